//! testapi.
