import sys

from notebooks.batch.cli import main

sys.exit(main())
