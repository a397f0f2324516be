//! Names that plugins send.

use std::path::{Component, Path, PathBuf};

/// Version of the API of device plugins.
pub(crate) const VERSION: &str = "v1beta1";
/// Longest prefix of a qualified name, in bytes.
const LONGEST_PREFIX: usize = 253;
/// Longest name after the prefix, in bytes.
const LONGEST_NAME: usize = 63;

/// Reason why a plugin is refused, with the kubelet's texts (`pkg/kubelet/cm/devicemanager/plugin/v1beta1`).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum PluginRefusal {
    /// The version is not supported.
    #[error("requested API version {0:?} is not supported by kubelet. Supported version is [\"v1beta1\"]")]
    Version(String),
    /// The plugin has no version that this agent supports.
    #[error("manager version, v1beta1, is not among plugin supported versions [{}]", .0.join(" "))]
    Versions(Vec<String>),
    /// The name is not that of an extended resource.
    #[error("the ResourceName {0:?} is invalid")]
    Resource(String),
    /// The socket is outside of the directory of device plugins.
    #[error("endpoint {0:?} is not the name of a socket below the directory of device plugins")]
    Endpoint(String),
    /// The socket cannot be used.
    #[error("failed to dial device plugin: {0}")]
    Dial(String),
    /// GetDevicePluginOptions failed.
    #[error("failed to get device plugin options: {0}")]
    Options(pod_sync_plugins::call::CallError),
    /// Too many resources are registered.
    #[error("more than {0} resources are registered")]
    TooMany(usize),
}

/// Checks the name of a resource (`pkg/apis/core/v1/helper: IsExtendedResourceName`).
pub(crate) fn check_resource(name: &str) -> Result<(), PluginRefusal> {
    let is_extended = name.split_once('/').is_some_and(|(prefix, rest)| {
        !name.contains("kubernetes.io/")
            && !prefix.starts_with("requests.")
            && is_prefix(prefix)
            && is_name(rest)
    });
    if is_extended { Ok(()) } else { Err(PluginRefusal::Resource(name.to_owned())) }
}

/// Returns whether `requests.` and the text are a DNS subdomain, as a quota has them.
fn is_prefix(text: &str) -> bool {
    let is_inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    let is_label = |label: &str| {
        !label.is_empty() && label.bytes().all(is_inner) && !label.starts_with('-') && !label.ends_with('-')
    };
    text.len().saturating_add("requests.".len()) <= LONGEST_PREFIX && text.split('.').all(is_label)
}

fn is_name(text: &str) -> bool {
    let is_end = |byte: Option<u8>| byte.is_some_and(|byte| byte.is_ascii_alphanumeric());
    let is_inner = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    text.len() <= LONGEST_NAME
        && text.bytes().all(is_inner)
        && is_end(text.bytes().next())
        && is_end(text.bytes().last())
}

/// Returns the socket of a plugin that registers at the agent's socket. The endpoint is a name below `dir`: a
/// path that leads out of the directory is refused.
pub(crate) fn endpoint(dir: &Path, name: &str) -> Result<PathBuf, PluginRefusal> {
    let path = Path::new(name);
    let mut parts = path.components().peekable();
    let is_below = parts.peek().is_some() && parts.all(|part| matches!(part, Component::Normal(_)));
    if is_below && !name.contains('\0') {
        Ok(dir.join(path))
    } else {
        Err(PluginRefusal::Endpoint(name.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_extended_resources_are_accepted() {
        let long = format!("a.com/{}", "x".repeat(63));
        for name in ["a.com/gpu", "nvidia.com/mig-1g.5gb", "a-b.c/X_1.y", &long] {
            assert_eq!(check_resource(name), Ok(()), "{name}");
        }
        let long = format!("{long}x");
        let prefix = format!("{}/x", "a.".repeat(123));
        for name in [
            "",
            "gpu",
            "cpu",
            "/gpu",
            "a.com/",
            "A.com/gpu",
            "a.com/-gpu",
            "a.com/gpu/x",
            "a..com/gpu",
            "-a.com/gpu",
            "kubernetes.io/gpu",
            "x.kubernetes.io/gpu",
            "requests.a.com/gpu",
            "a.com/g pu",
            &long,
            &prefix,
        ] {
            let expected = format!("the ResourceName {name:?} is invalid");
            assert_eq!(check_resource(name).unwrap_err().to_string(), expected);
        }
    }

    #[test]
    fn an_endpoint_is_below_the_directory() {
        let dir = Path::new("/d");
        assert_eq!(endpoint(dir, "gpu.sock"), Ok(PathBuf::from("/d/gpu.sock")));
        assert_eq!(endpoint(dir, "sub/gpu.sock"), Ok(PathBuf::from("/d/sub/gpu.sock")));
        for name in ["", ".", "..", "../gpu.sock", "a/../../b", "/run/x.sock", "a\0b"] {
            assert_eq!(endpoint(dir, name), Err(PluginRefusal::Endpoint(name.to_owned())));
        }
    }
}
