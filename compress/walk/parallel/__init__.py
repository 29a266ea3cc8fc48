"""One compression in several processes: calibration is divided among them, linears are solved side by side."""
