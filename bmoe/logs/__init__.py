"""Logs of any number of runs, brought together in one DuckDB file: the API for programs and notebooks.

with open_logs() as logs:
    logs.runs(model="qwen").to_pandas()
    logs.sql("SELECT avg(wall_ns) FROM steps WHERE run_id = ?", [run_id])
"""

from bmoe.logs.ingestion import IngestReport, follow, ingest
from bmoe.logs.store import LogStore, default_db_path, open_logs

__all__ = ["IngestReport", "LogStore", "default_db_path", "follow", "ingest", "open_logs"]
