//! The command line.
use std::path::PathBuf;

use clap::Parser;
use quintlet_kit::args::CommonArgs;

/// Owns the container runtime: every CRI call, image pull and runtime event of this node goes through it.
#[derive(Debug, Clone, Parser)]
#[command(name = "cri-proxy", version)]
pub struct Args {
    /// The runtime's socket; images come from the same.
    #[arg(long, value_name = "URL", default_value = "unix:///run/containerd/containerd.sock", value_parser = endpoint)]
    pub runtime_endpoint: PathBuf,
    /// The containerd namespace pods run in.
    #[arg(long, value_name = "NAME", default_value = "k8s.io", value_parser = namespace)]
    pub containerd_namespace: String,
    /// A uid that may connect, besides root and this process's own; may be given several times.
    #[arg(long, value_name = "UID")]
    pub allow_uid: Vec<u32>,
    /// What every service has.
    #[command(flatten)]
    pub common: CommonArgs,
}

/// Reads `unix:///path` or an absolute path.
fn endpoint(text: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(text.strip_prefix("unix://").unwrap_or(text));
    if path.is_absolute() { Ok(path) } else { Err("want unix:///absolute/path".to_owned()) }
}

/// containerd's own rule for namespaces, which also makes them safe in filters and metadata.
fn namespace(text: &str) -> Result<String, String> {
    let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
    if !text.is_empty() && text.len() <= 76 && text.chars().all(fits) {
        Ok(text.to_owned())
    } else {
        Err("want at most 76 letters, digits, dots, dashes and underscores".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_are_absolute_paths_with_or_without_scheme() {
        assert_eq!(endpoint("unix:///run/x.sock"), Ok("/run/x.sock".into()));
        assert_eq!(endpoint("/run/x.sock"), Ok("/run/x.sock".into()));
        for bad in ["", "x.sock", "unix://x.sock", "tcp://127.0.0.1:1"] {
            assert!(endpoint(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn namespaces_cannot_break_out_of_a_filter() {
        assert!(namespace("k8s.io").is_ok());
        for bad in ["", "a\"b", "a,b", "a b", "a\n"] {
            assert!(namespace(bad).is_err(), "{bad:?}");
        }
    }
}
