"""Additional outputs for metrics: CSV tables, TensorBoard, tracking services."""
