"""python -m tightkv.cli"""

import sys

from tightkv.cli import main

sys.exit(main())
