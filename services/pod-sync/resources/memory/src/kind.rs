//! Kinds of memory.

use std::fmt;

use quintlet_model::quantity::{Format, Quantity};

const MEMORY: &str = "memory";
const HUGE_PAGES: &str = "hugepages-";

/// A kind of memory, by its name as a resource: `memory`, or huge pages of one size, such as `hugepages-2Mi`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MemoryKind(String);

impl MemoryKind {
    /// Returns ordinary memory.
    #[must_use]
    pub fn memory() -> Self {
        Self(MEMORY.to_owned())
    }

    /// Returns huge pages of a size in bytes.
    #[must_use]
    pub fn huge_pages(page: u64) -> Self {
        let size = Quantity::from_units(i64::try_from(page).unwrap_or(i64::MAX), Format::Binary);
        Self(format!("{HUGE_PAGES}{}", size.to_api().0))
    }

    /// Returns the kind with the name of a resource; none if the resource is no memory.
    #[must_use]
    pub fn parse(resource: &str) -> Option<Self> {
        let is_memory = resource == MEMORY || resource.starts_with(HUGE_PAGES);
        is_memory.then(|| Self(resource.to_owned()))
    }
}

impl fmt::Display for MemoryKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
