//! Sets of logical CPUs.

use std::collections::{BTreeSet, btree_set};
use std::fmt;
use std::str::FromStr;

use quintlet_model::cpu_list::{CpuList, InvalidCpuList};

use crate::ids::CpuId;

/// A set of logical CPUs. Its text form is the kernel's list format, such as `0-3,8` (`k8s.io/utils/cpuset`).
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct CpuSet(BTreeSet<CpuId>);

impl CpuSet {
    /// Returns the empty set.
    #[must_use]
    pub const fn new() -> Self {
        Self(BTreeSet::new())
    }

    /// Returns the number of CPUs.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns whether there is no CPU.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns whether the set has a CPU.
    #[must_use]
    pub fn contains(&self, cpu: CpuId) -> bool {
        self.0.contains(&cpu)
    }

    /// Returns the CPUs in ascending order.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = CpuId> + '_ {
        self.0.iter().copied()
    }

    /// Returns the CPUs of both sets.
    #[must_use]
    pub fn union(&self, other: &Self) -> Self {
        Self(self.0.union(&other.0).copied().collect())
    }

    /// Returns the CPUs that both sets have.
    #[must_use]
    pub fn intersection(&self, other: &Self) -> Self {
        Self(self.0.intersection(&other.0).copied().collect())
    }

    /// Returns the CPUs that `other` does not have.
    #[must_use]
    pub fn difference(&self, other: &Self) -> Self {
        Self(self.0.difference(&other.0).copied().collect())
    }

    /// Returns whether `other` has all CPUs of this set.
    #[must_use]
    pub fn is_subset(&self, other: &Self) -> bool {
        self.0.is_subset(&other.0)
    }

    /// Returns whether no CPU is in both sets.
    #[must_use]
    pub fn is_disjoint(&self, other: &Self) -> bool {
        self.0.is_disjoint(&other.0)
    }
}

impl FromIterator<CpuId> for CpuSet {
    fn from_iter<T: IntoIterator<Item = CpuId>>(cpus: T) -> Self {
        Self(cpus.into_iter().collect())
    }
}

impl Extend<CpuId> for CpuSet {
    fn extend<T: IntoIterator<Item = CpuId>>(&mut self, cpus: T) {
        self.0.extend(cpus);
    }
}

impl IntoIterator for CpuSet {
    type Item = CpuId;
    type IntoIter = btree_set::IntoIter<CpuId>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.into_iter()
    }
}

impl From<&CpuList> for CpuSet {
    fn from(list: &CpuList) -> Self {
        list.iter().map(CpuId::new).collect()
    }
}

impl FromStr for CpuSet {
    type Err = InvalidCpuList;

    fn from_str(text: &str) -> Result<Self, InvalidCpuList> {
        CpuList::parse(text).map(|list| Self::from(&list))
    }
}

impl fmt::Display for CpuSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.iter().map(CpuId::number).collect::<CpuList>().fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_text_of_a_set_has_the_kernels_list_format() {
        for (text, written) in [("", ""), ("3,1-2,0,8", "0-3,8"), ("5", "5"), ("0-1,3", "0-1,3")] {
            assert_eq!(text.parse::<CpuSet>().unwrap().to_string(), written);
        }
        for bad in ["a", "3-1", "0-4294967295", "-1"] {
            assert!(bad.parse::<CpuSet>().is_err(), "{bad}");
        }
    }

    proptest! {
        #[test]
        fn a_set_that_was_written_is_read(numbers in prop::collection::btree_set(0_u32..300, 0..60)) {
            let set: CpuSet = numbers.iter().copied().map(CpuId::new).collect();
            prop_assert_eq!(set.to_string().parse::<CpuSet>().unwrap(), set);
        }
    }
}
