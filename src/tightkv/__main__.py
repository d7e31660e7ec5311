"""python -m tightkv"""

import sys

from tightkv.cli import main

sys.exit(main())
