"""The measurements in the repository are of the kernels in the repository.

Who changes the code of a measured kernel sees it here: what was measured of it is not used any more, so dispatch falls back to
what is left until it is measured again. Then the data lose those records, in the same commit.
"""

from collections import Counter

import pytest

from specgen.data_files import SPECS
from specgen.load import load
from specgen.measured import measured
from specgen.tuning.shipped import DIRECTORY

FILES = sorted(DIRECTORY.glob("*.jsonl"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_no_measurement_in_the_repository_is_stale(file):
    _, _, spec = file.stem.partition("_")  # after the GPU
    usable, stale = measured(load(SPECS / f"{spec}.yaml"))
    assert Counter(each.reason for each in stale) == {}
    assert usable
