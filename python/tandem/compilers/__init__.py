"""What compilers and exporters of torch are told of the library, none of which is imported for it."""
