//! localnode.
