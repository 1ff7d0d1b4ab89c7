"""`python -m bert_fast`: the command line."""

import sys

from bert_fast.cli.main import main

sys.exit(main())
