from specgen.cli import main
import sys
sys.exit(main())
