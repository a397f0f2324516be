//! Pods with extreme values in every field.
//!
//! - [`quintlet_testkit::fields`] lists the fields of a pod, from the types with which the product decodes
//!   pods;
//! - [`class`] assigns a class to each field, and with it the extreme values;
//! - [`cases`] builds one pod per field and extreme value;
//! - [`verdict`] reads the outcome of a pod from its status and events;
//! - [`outcomes`] compares the outcome of each pod with a committed file.
//!
//! A field that a new version of the API adds has no class and no expected outcome: the tests fail until it
//! has both.

pub mod cases;
pub mod class;
pub mod outcomes;
pub mod verdict;
