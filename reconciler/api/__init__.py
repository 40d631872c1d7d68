"""The HTTP API: it records intent; what happens then is the tasks' business."""
