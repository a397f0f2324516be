//! Lists of CPUs, such as `0-3,8` (`k8s.io/utils/cpuset`).

use std::collections::BTreeSet;
use std::fmt;

/// Highest number of a CPU that a list may have. Linux supports fewer CPUs on every architecture.
const HIGHEST: u32 = 65_535;

/// A set of CPUs, by number.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CpuList(BTreeSet<u32>);

/// A text is not a list of CPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("is not a list of CPUs, expected for example 0-3,8")]
pub struct InvalidCpuList;

impl CpuList {
    /// Parses a list of numbers and ranges, separated by commas. An empty text is the empty set.
    ///
    /// # Errors
    /// A part is neither a number nor an ascending range, or a number is above 65535.
    pub fn parse(text: &str) -> Result<Self, InvalidCpuList> {
        let text = text.trim();
        if text.is_empty() {
            return Ok(Self::default());
        }
        let number = |text: &str| {
            let number = text.parse::<u32>().ok().filter(|_| text.bytes().all(|b| b.is_ascii_digit()));
            number.filter(|number| *number <= HIGHEST).ok_or(InvalidCpuList)
        };
        let mut cpus = BTreeSet::new();
        for part in text.split(',') {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let (first, last) = (number(first)?, number(last)?);
            if first > last {
                return Err(InvalidCpuList);
            }
            cpus.extend(first..=last);
        }
        Ok(Self(cpus))
    }

    /// Returns the number of CPUs.
    #[must_use]
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// Returns the CPUs, in ascending order.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = u32> + '_ {
        self.0.iter().copied()
    }

    /// Returns the CPUs that both lists have.
    #[must_use]
    pub fn intersection(&self, other: &Self) -> Self {
        Self(self.0.intersection(&other.0).copied().collect())
    }

    /// Returns whether `others` has all CPUs of this list.
    #[must_use]
    pub fn is_subset_of(&self, others: &Self) -> bool {
        self.0.is_subset(&others.0)
    }
}

impl FromIterator<u32> for CpuList {
    fn from_iter<T: IntoIterator<Item = u32>>(numbers: T) -> Self {
        Self(numbers.into_iter().collect())
    }
}

/// Writes ranges where numbers follow each other.
impl fmt::Display for CpuList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut cpus = self.0.iter().copied().peekable();
        let mut separator = "";
        while let Some(first) = cpus.next() {
            let mut last = first;
            while let Some(next) = cpus.next_if_eq(&last.saturating_add(1)) {
                last = next;
            }
            write!(f, "{separator}{first}")?;
            if last > first {
                write!(f, "-{last}")?;
            }
            separator = ",";
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_of_cpus_has_numbers_and_ranges() {
        let shown = |text: &str| CpuList::parse(text).map(|list| (list.to_string(), list.count()));
        for (text, want) in [
            ("", ("", 0)),
            ("0-1\n", ("0-1", 2)),
            ("3,1-2,0,8", ("0-3,8", 5)),
            ("0-3,2-5", ("0-5", 6)),
            ("65535", ("65535", 1)),
        ] {
            assert_eq!(shown(text), Ok((want.0.to_owned(), want.1)), "{text:?}");
        }
        for bad in ["a", "1-", "-1", "3-1", "0,,1", "0 1", "+1", "65536", "0-4294967295", "1-2-3"] {
            assert_eq!(shown(bad), Err(InvalidCpuList), "{bad:?}");
        }
        let all = CpuList::parse("0-3").unwrap();
        assert!(CpuList::parse("1,3").unwrap().is_subset_of(&all));
        assert!(!CpuList::parse("3-4").unwrap().is_subset_of(&all));
        assert_eq!(CpuList::parse("2-9").unwrap().intersection(&all).to_string(), "2-3");
        assert!(all.iter().eq([0, 1, 2, 3]));
    }
}
