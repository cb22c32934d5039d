"""What happened to each request, told as runs, spans, metrics and pages: functions of one immutable record."""
