"""The application with every command."""

from ..app import app as app
from ..app import run as run
from . import bench as bench
from . import catalogue as catalogue
from . import checkpoint as checkpoint
from . import evaluate as evaluate
from . import report as report
