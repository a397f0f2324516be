//! pleg-service: see ARCHITECTURE.md.
