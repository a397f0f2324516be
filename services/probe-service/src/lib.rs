//! probe-service: see ARCHITECTURE.md.
