//! The command line of pod-sync.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::Parser;
use quintlet_kit::args::CommonArgs;

/// Desired pods, one worker per pod, pod status.
///
/// pod-sync reads pods from a manifest directory, a URL and an API server, and makes them run through cri-proxy. It owns
/// the root directory: a second one on the same directory does not start.
#[derive(Debug, Clone, Parser)]
#[command(name = "pod-sync", version)]
pub struct Args {
    /// Arguments every service has.
    #[command(flatten)]
    pub common: CommonArgs,
    /// The kubelet's root directory: pods, volumes, checkpoints.
    #[arg(long, default_value = "/var/lib/kubelet", value_name = "DIR")]
    pub root_dir: PathBuf,
    /// Directory (or one file) of pod manifests: YAML or JSON, with ConfigMaps and Secrets among them.
    #[arg(long, value_name = "PATH")]
    pub manifests: Option<PathBuf>,
    /// How often manifests are read again when nothing seems to have changed.
    #[arg(long, default_value = "20s", value_parser = humantime::parse_duration, value_name = "DURATION")]
    pub file_check_frequency: Duration,
    /// URL of a pod or a list of pods.
    #[arg(long, value_name = "URL")]
    pub manifest_url: Option<String>,
    /// A header for that URL, `Name: value`; may be given more than once.
    #[arg(long, value_name = "HEADER", value_parser = header)]
    pub manifest_url_header: Vec<(String, String)>,
    /// How often the URL is fetched.
    #[arg(long, default_value = "20s", value_parser = humantime::parse_duration, value_name = "DURATION")]
    pub http_check_frequency: Duration,
    /// Credentials for the API server. Without it pod-sync runs standalone.
    #[arg(long, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// Name of the node. Default: the host's name in lower case.
    #[arg(long, value_name = "NAME")]
    pub node_name: Option<String>,
    /// Address of the node. Default: that of the interface with the default route.
    #[arg(long, value_name = "IP")]
    pub node_ip: Vec<IpAddr>,
    /// A label for the node, `key=value`; may be given more than once.
    #[arg(long, value_name = "LABEL", value_parser = label)]
    pub node_label: Vec<(String, String)>,
    /// Cgroup under which `kubepods` stands.
    #[arg(long, default_value = "/", value_name = "CGROUP")]
    pub cgroup_root: String,
    /// Directory of the pods' logs.
    #[arg(long, default_value = "/var/log/pods", value_name = "DIR")]
    pub pod_logs_dir: PathBuf,
    /// Directory of links to containers' logs, for log collectors. Empty: no links.
    #[arg(long, default_value = "/var/log/containers", value_name = "DIR")]
    pub container_logs_dir: String,
    /// Domain of the cluster, for DNS search lists. Empty: none.
    #[arg(long, default_value = "cluster.local", value_name = "DOMAIN")]
    pub cluster_domain: String,
    /// Address of the cluster's DNS server; may be given more than once.
    #[arg(long, value_name = "IP")]
    pub cluster_dns: Vec<String>,
    /// resolv.conf for pods with DNS policy Default. Empty: none.
    #[arg(long, default_value = "/etc/resolv.conf", value_name = "FILE")]
    pub resolv_conf: String,
    /// How often a pod is looked at when nothing happened to it; jitter of up to half of it is added.
    #[arg(long, default_value = "1m", value_parser = humantime::parse_duration, value_name = "DURATION")]
    pub sync_frequency: Duration,
}

impl Args {
    /// Labels of the node.
    #[must_use]
    pub fn labels(&self) -> BTreeMap<String, String> {
        self.node_label.iter().cloned().collect()
    }
}

fn label(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or("want key=value")?;
    if key.is_empty() { Err("want key=value".to_owned()) } else { Ok((key.to_owned(), value.to_owned())) }
}

fn header(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once(':').ok_or("want `Name: value`")?;
    Ok((name.trim().to_owned(), value.trim().to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

    #[test]
    fn the_command_line_holds_together() {
        Args::command().debug_assert();
        let args =
            Args::try_parse_from(["pod-sync", "--sync-frequency", "5s", "--node-label", "a=b"]).unwrap();
        assert_eq!((args.sync_frequency, args.labels().len()), (Duration::from_secs(5), 1));
        for bad in [
            ["--sync-frequency", "5"],
            ["--node-label", "x"],
            ["--node-ip", "nine"],
            ["--manifest-url-header", "x"],
        ] {
            assert!(Args::try_parse_from(["pod-sync", bad[0], bad[1]]).is_err(), "{bad:?}");
        }
    }
}
