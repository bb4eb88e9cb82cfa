"""The command line: each command parses, calls a job, and prints."""

from . import bench as bench
from . import catalogue as catalogue
from . import checkpoints as checkpoints
from . import running as running
from .app import app as app
from .app import main as main
