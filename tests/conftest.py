"""Options of the test run."""


def pytest_addoption(parser):
    parser.addoption(
        "--update-goldens",
        action="store_true",
        help="rewrite tests/cases/*/{expected,stderr.txt} from what is generated now; review the difference",
    )
