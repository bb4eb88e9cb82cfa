"""The application with every command."""

from . import bench as bench
from . import catalogue as catalogue
from . import checkpoints as checkpoints
from . import running as running
from .app import app as app
from .app import run as run
