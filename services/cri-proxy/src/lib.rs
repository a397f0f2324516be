//! cri-proxy: see ARCHITECTURE.md.
