"""What models write: greedily and by temperature."""
