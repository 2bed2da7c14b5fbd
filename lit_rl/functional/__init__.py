"""Pure tensor maths: torch in, torch out, float32 or better, no settings objects, no state."""
