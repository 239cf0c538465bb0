"""Where metrics go beside the run's own file: tables, TensorBoard, tracking services."""
