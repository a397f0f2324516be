//! Nothing but the dependencies in Cargo.toml: cargo unifies their features with those of what is built
//! beside this crate.
