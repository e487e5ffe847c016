"""Entry point of `python -m automodel_rl`."""

import sys

from automodel_rl.cli import main

sys.exit(main())
