"""Reports: plans as text and pictures, fused compared with unfused, and what quantizing does to each tensor."""
