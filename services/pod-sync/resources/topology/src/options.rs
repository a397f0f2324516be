//! Options of the policies (`topologyManagerPolicyOptions`).

use std::collections::BTreeMap;

/// Number of NUMA nodes up to which the policies are supported by default (`defaultMaxAllowableNUMANodes`).
const DEFAULT_NODES: usize = 8;
const CLOSEST: &str = "prefer-closest-numa-nodes";
const NODES: &str = "max-allowable-numa-nodes";

/// Options of the policies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TopologyOptions {
    /// Whether the set with the smaller mean distance is better of two with as many nodes.
    pub prefer_closest: bool,
    /// Highest number of NUMA nodes of the machine.
    pub max_nodes: usize,
}

impl Default for TopologyOptions {
    fn default() -> Self {
        Self { prefer_closest: false, max_nodes: DEFAULT_NODES }
    }
}

/// An option cannot be used. The texts are the kubelet's.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TopologyOptionError {
    /// There is no such option.
    #[error("unknown Topology Manager Policy option: {0:?}")]
    Unknown(String),
    /// The value is not a boolean.
    #[error("bad value for option {name:?}: {value:?}")]
    NotBoolean {
        /// Name of the option.
        name: &'static str,
        /// Value in the configuration.
        value: String,
    },
    /// The value is not a number.
    #[error("unable to convert policy option to integer {name:?}: {value:?}")]
    NotNumber {
        /// Name of the option.
        name: &'static str,
        /// Value in the configuration.
        value: String,
    },
    /// The number of nodes is below the default.
    #[error("the minimum value of {name:?} should not be less than {least}")]
    TooFewNodes {
        /// Name of the option.
        name: &'static str,
        /// The least value.
        least: usize,
    },
}

impl TopologyOptions {
    /// Parses the options of the configuration. Both are generally available, so that no feature gate is
    /// needed.
    ///
    /// # Errors
    /// See [`TopologyOptionError`].
    pub fn parse(options: &BTreeMap<String, String>) -> Result<Self, TopologyOptionError> {
        let mut parsed = Self::default();
        for (name, value) in options {
            match name.as_str() {
                CLOSEST => parsed.prefer_closest = boolean(CLOSEST, value)?,
                NODES => parsed.max_nodes = node_count(value)?,
                _ => return Err(TopologyOptionError::Unknown(name.clone())),
            }
        }
        Ok(parsed)
    }
}

fn node_count(value: &str) -> Result<usize, TopologyOptionError> {
    let not_number = || TopologyOptionError::NotNumber { name: NODES, value: value.to_owned() };
    let nodes: i64 = value.parse().map_err(|_| not_number())?;
    let count = usize::try_from(nodes).ok().filter(|count| *count >= DEFAULT_NODES);
    count.ok_or(TopologyOptionError::TooFewNodes { name: NODES, least: DEFAULT_NODES })
}

/// Parses a boolean as Go's `strconv.ParseBool` does.
fn boolean(name: &'static str, value: &str) -> Result<bool, TopologyOptionError> {
    match value {
        "1" | "t" | "T" | "TRUE" | "true" | "True" => Ok(true),
        "0" | "f" | "F" | "FALSE" | "false" | "False" => Ok(false),
        _ => Err(TopologyOptionError::NotBoolean { name, value: value.to_owned() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_parsed_or_refused_with_the_kubelets_text() {
        let parse = |pairs: &[(&str, &str)]| {
            let pairs = pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
            TopologyOptions::parse(&pairs.collect()).map_err(|error| error.to_string())
        };
        let options = |prefer_closest, max_nodes| Ok(TopologyOptions { prefer_closest, max_nodes });
        assert_eq!(parse(&[]), options(false, 8));
        assert_eq!(parse(&[(CLOSEST, "true"), (NODES, "9")]), options(true, 9));
        assert_eq!(parse(&[(CLOSEST, "F"), (NODES, "8")]), options(false, 8));
        for (name, value, text) in [
            ("other", "true", "unknown Topology Manager Policy option: \"other\""),
            (CLOSEST, "yes", "bad value for option \"prefer-closest-numa-nodes\": \"yes\""),
            (
                NODES,
                "many",
                "unable to convert policy option to integer \"max-allowable-numa-nodes\": \"many\"",
            ),
            (NODES, "7", "the minimum value of \"max-allowable-numa-nodes\" should not be less than 8"),
            (NODES, "-1", "the minimum value of \"max-allowable-numa-nodes\" should not be less than 8"),
        ] {
            assert_eq!(parse(&[(name, value)]), Err(text.to_owned()));
        }
    }
}
