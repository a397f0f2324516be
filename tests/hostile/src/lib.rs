//! Pods with extreme values in every field.
//!
//! - [`quintlet_testkit::fields`] lists the fields of a pod, from the types that the product decodes pods with;
//! - [`class`] says of which class a field is, and with that which values are extreme for it;
//! - [`cases`] makes one pod per field and extreme value;
//! - [`verdict`] reads what became of a pod from its status and events;
//! - [`outcomes`] compares what became of each pod with a committed file.
//!
//! A field that a new version of the API adds has no class and no expected outcome: the tests fail until it has both.

pub mod cases;
pub mod class;
pub mod outcomes;
pub mod verdict;
