//! The command line.
use std::path::PathBuf;
use std::time::Duration;

use clap::Parser;
use quintlet_config::ConfigArgs;
use quintlet_kit::args::CommonArgs;

/// Owns the container runtime: every CRI call, image pull and runtime event of this node goes through it.
#[derive(Debug, Clone, Parser)]
#[command(
    name = "cri-proxy",
    version,
    after_help = "`cri-proxy node-api` is another process: it serves the node's HTTPS API as a client of this one. \
                  See `cri-proxy node-api --help`."
)]
pub struct Args {
    /// The runtime's socket.
    #[arg(long, alias = "container-runtime-endpoint", value_name = "URL", default_value = "unix:///run/containerd/containerd.sock", value_parser = endpoint)]
    pub runtime_endpoint: PathBuf,
    /// The image service's socket. Default: the runtime's.
    #[arg(long, value_name = "URL", value_parser = endpoint)]
    pub image_service_endpoint: Option<PathBuf>,
    /// How long a call to the runtime may take, with a unit; pulls, execs and attaches have no such limit.
    #[arg(long, value_name = "DURATION", default_value = "2m", value_parser = humantime::parse_duration)]
    pub runtime_request_timeout: Duration,
    /// The containerd namespace pods run in.
    #[arg(long, value_name = "NAME", default_value = "k8s.io", value_parser = namespace)]
    pub containerd_namespace: String,
    /// A uid that may connect, besides root and this process's own; may be given several times.
    #[arg(long, value_name = "UID")]
    pub allow_uid: Vec<u32>,
    /// What every service has.
    #[command(flatten)]
    pub common: CommonArgs,
    /// Where the configuration is.
    #[command(flatten)]
    pub config: ConfigArgs,
}

/// First word of the command line of the other process that this binary can be.
pub const NODE_API: &str = "node-api";

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
    use clap::CommandFactory as _;
    use quintlet_config::Service;

    use super::*;

    #[test]
    fn the_table_of_fields_and_the_flags_are_the_same() {
        Args::command().debug_assert();
        assert_eq!(quintlet_config::cli::problems(&Args::command(), Service::CriProxy), [""; 0]);
    }

    #[test]
    fn the_file_names_the_runtime() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c.yaml");
        let file = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n\
                    containerRuntimeEndpoint: unix:///r.sock\nimageServiceEndpoint: unix:///i.sock\nruntimeRequestTimeout: 7s\n\
                    ---\napiVersion: quintlet.dev/v1alpha1\nkind: QuintletConfiguration\ncontainerdNamespace: n\nallowUIDs: [7, 8]\n";
        std::fs::write(&path, file).unwrap();
        let line =
            ["cri-proxy", "--config", path.to_str().unwrap(), "--image-service-endpoint", "/flag.sock"];
        let args =
            quintlet_config::cli::read::<Args>(Service::CriProxy, line.map(Into::into).into()).unwrap().args;
        assert_eq!(args.runtime_endpoint, PathBuf::from("/r.sock"));
        assert_eq!(args.image_service_endpoint, Some("/flag.sock".into()), "a flag wins");
        assert_eq!(args.runtime_request_timeout, Duration::from_secs(7));
        assert_eq!((args.containerd_namespace.as_str(), args.allow_uid), ("n", vec![7, 8]));
    }

    #[test]
    fn uids_come_from_flags_too() {
        let line = ["cri-proxy", "--allow-uid", "65532", "--allow-uid", "7"];
        let args =
            quintlet_config::cli::read::<Args>(Service::CriProxy, line.map(Into::into).into()).unwrap().args;
        assert_eq!(args.allow_uid, [65532, 7]);
    }

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
