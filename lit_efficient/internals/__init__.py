"""Every private name of a dependency that this package leans on, a small module by subject; a test holds each one."""
