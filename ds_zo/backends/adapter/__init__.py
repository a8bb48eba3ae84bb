"""First-order training of adapters over a frozen base that is streamed."""
