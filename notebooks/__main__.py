import sys

from notebooks.cli import main

sys.exit(main())
