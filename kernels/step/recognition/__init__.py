"""What a transformers decoder consists of, found by inspection."""
