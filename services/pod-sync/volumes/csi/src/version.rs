//! Versions of the CSI API (`k8s.io/apimachinery/pkg/util/version: HighestSupportedVersion`).

use std::cmp::Ordering;
use std::fmt;

/// A version: two or more numbers. Missing numbers count as zero.
#[derive(Debug, Clone)]
pub struct Version(Vec<u64>);

/// Reason why no version of a driver is usable.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum VersionError {
    /// The text has no number at its start.
    #[error("could not parse {0:?} as version")]
    Unparsable(String),
    /// Fewer than two numbers.
    #[error("illegal version string {0:?}")]
    Short(String),
    /// The first number begins with a zero.
    #[error("illegal zero-prefixed version component {component:?} in {version:?}")]
    ZeroPrefixed {
        /// The component of the version.
        component: String,
        /// The whole version.
        version: String,
    },
    /// A number is too large.
    #[error("illegal non-numeric version component {component:?} in {version:?}: value out of range")]
    TooLarge {
        /// The component of the version.
        component: String,
        /// The whole version.
        version: String,
    },
    /// No version is 0.x or 1.x.
    #[error("could not find a highest supported version from versions ({versions}) reported: {cause}")]
    NoneSupported {
        /// The versions, as Go prints a list.
        versions: String,
        /// The last error, `<nil>` without one.
        cause: String,
    },
    /// The highest version is 0.x.
    #[error("highest supported version reported is {0}, must be v1.x")]
    Old(Version),
}

impl Version {
    /// Parses a version. Blanks around it, a `v` before it and any text after its numbers are ignored.
    ///
    /// # Errors
    /// Fails unless the text has two or more numbers, separated by dots.
    pub fn parse(text: &str) -> Result<Self, VersionError> {
        let trimmed = text.trim_start();
        let trimmed = trimmed.strip_prefix('v').unwrap_or(trimmed);
        let mut numbers = Vec::new();
        let mut rest = trimmed;
        loop {
            let digits = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
            let (component, after) = rest.split_at(digits);
            if component.is_empty() {
                break;
            }
            numbers.push(component);
            match after.strip_prefix('.') {
                Some(next) if next.starts_with(|c: char| c.is_ascii_digit()) => rest = next,
                _ => break,
            }
        }
        let Some(first) = numbers.first() else { return Err(VersionError::Unparsable(text.to_owned())) };
        if numbers.len() < 2 {
            return Err(VersionError::Short(text.to_owned()));
        }
        if first.len() > 1 && first.starts_with('0') {
            let (component, version) = ((*first).to_owned(), text.to_owned());
            return Err(VersionError::ZeroPrefixed { component, version });
        }
        let number = |component: &&str| {
            component.parse::<u64>().map_err(|_| VersionError::TooLarge {
                component: (*component).to_owned(),
                version: text.to_owned(),
            })
        };
        numbers.iter().map(number).collect::<Result<_, _>>().map(Self)
    }

    fn major(&self) -> u64 {
        self.0.first().copied().unwrap_or(0)
    }
}

/// Returns the highest version 1.x. Versions that cannot be parsed and those from 2.0 on are ignored.
///
/// # Errors
/// Fails if no version is left, or only versions 0.x.
pub(crate) fn highest(versions: &[String]) -> Result<Version, VersionError> {
    let mut cause = "<nil>".to_owned();
    let mut highest: Option<Version> = None;
    for version in versions.iter().rev() {
        match Version::parse(version) {
            Ok(version) if version.major() > 1 => {}
            Ok(version) => highest = highest.max(Some(version)),
            Err(error) => cause = error.to_string(),
        }
    }
    let versions = || format!("[{}]", versions.join(" "));
    let highest = highest.ok_or_else(|| VersionError::NoneSupported { versions: versions(), cause })?;
    if highest.major() == 1 { Ok(highest) } else { Err(VersionError::Old(highest)) }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let numbers: Vec<String> = self.0.iter().map(u64::to_string).collect();
        f.write_str(&numbers.join("."))
    }
}

impl Ord for Version {
    fn cmp(&self, other: &Self) -> Ordering {
        let longest = self.0.len().max(other.0.len());
        let padded = |v: &Self| -> Vec<u64> {
            v.0.iter().copied().chain(std::iter::repeat(0)).take(longest).collect()
        };
        padded(self).cmp(&padded(other))
    }
}

impl PartialOrd for Version {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Version {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Version {}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(versions: &[&str]) -> Result<String, String> {
        let versions: Vec<String> = versions.iter().map(|v| (*v).to_owned()).collect();
        highest(&versions).map(|v| v.to_string()).map_err(|e| e.to_string())
    }

    #[test]
    fn the_highest_version_below_two_wins() {
        for (versions, expected) in [
            (&["1.0.0"][..], Ok("1.0.0")),
            (&["1.2.0", "1.10.0", "1.9.9"], Ok("1.10.0")),
            (&["v1.0", "0.3.0"], Ok("1.0")),
            (&["2.0.0", "1.1.0"], Ok("1.1.0")),
            (&["garbage", " 1.3.0-alpha.1 "], Ok("1.3.0")),
            (&["0.3.0"], Err("highest supported version reported is 0.3.0, must be v1.x")),
            (
                &["2.0.0", "3.1"],
                Err("could not find a highest supported version from versions ([2.0.0 3.1]) reported: <nil>"),
            ),
            (
                &["garbage"],
                Err("could not find a highest supported version from versions ([garbage]) reported: \
                     could not parse \"garbage\" as version"),
            ),
            (
                &["01.2"],
                Err("could not find a highest supported version from versions ([01.2]) reported: \
                     illegal zero-prefixed version component \"01\" in \"01.2\""),
            ),
            (
                &["1"],
                Err("could not find a highest supported version from versions ([1]) reported: \
                     illegal version string \"1\""),
            ),
            (
                &["1.99999999999999999999"],
                Err(
                    "could not find a highest supported version from versions ([1.99999999999999999999]) reported: \
                     illegal non-numeric version component \"99999999999999999999\" in \"1.99999999999999999999\": \
                     value out of range",
                ),
            ),
        ] {
            assert_eq!(of(versions), expected.map(str::to_owned).map_err(str::to_owned), "{versions:?}");
        }
    }

    #[test]
    fn missing_numbers_count_as_zero() {
        assert_eq!(Version::parse("1.2").unwrap(), Version::parse("v1.2.0").unwrap());
        assert!(Version::parse("1.2.1").unwrap() > Version::parse("1.2").unwrap());
    }
}
