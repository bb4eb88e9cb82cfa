"""The report of quantized models: its facts, its charts, its page."""

from .facts import Report as Report
from .page import check_page_path as check_page_path
from .page import report_page as report_page
from .page import save_page as save_page
