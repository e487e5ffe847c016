"""`python -m automodel_rl` is the command line."""

import sys

from automodel_rl.cli import main

sys.exit(main())
