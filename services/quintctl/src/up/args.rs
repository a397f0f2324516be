//! The options of `quintctl up`.

use std::ffi::OsString;
use std::path::PathBuf;

use quintlet_config::table::Service;

/// An argument for one service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServiceArgument {
    /// The service that gets the argument.
    pub service: Service,
    /// The argument, which follows those of `quintctl up`.
    pub argument: OsString,
}

/// Run the five services on this machine until interrupted.
#[derive(Debug, Clone, clap::Args)]
pub struct UpArgs {
    /// Configuration file of the services; options of this command take precedence
    #[arg(long, value_name = "FILE", help_heading = "Configuration")]
    pub config: Option<PathBuf>,
    /// Directory of drop-in files *.conf, merged into the configuration in lexical order
    #[arg(long, value_name = "DIR", help_heading = "Configuration")]
    pub config_dir: Option<PathBuf>,
    /// Treat warnings about the configuration as errors
    #[arg(long, help_heading = "Configuration")]
    pub strict: bool,
    /// Directory of pod manifests [default: BASE/manifests, or /etc/kubernetes/manifests]
    #[arg(long, value_name = "DIR")]
    pub manifests: Option<PathBuf>,
    /// URL of a pod manifest
    #[arg(long, value_name = "URL")]
    pub manifest_url: Option<String>,
    /// Parent of all directories that no other option sets [default: .run with --private-containerd]
    #[arg(long, value_name = "DIR")]
    pub base: Option<PathBuf>,
    /// The node's root directory [default: BASE/root, or /var/lib/kubelet]
    #[arg(long, value_name = "DIR")]
    pub root_dir: Option<PathBuf>,
    /// Directory of the services' sockets and state [default: BASE/run, or /run/quintlet]
    #[arg(long, value_name = "DIR")]
    pub run_dir: Option<PathBuf>,
    /// Directory of the services' logs [default: BASE/logs, or /var/log/quintlet]
    #[arg(long, value_name = "DIR")]
    pub log_dir: Option<PathBuf>,
    /// Size at which a service's log is rotated to .log.1, in MiB
    #[arg(long, value_name = "MIB", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    pub log_max_size: u64,
    /// Number of files kept of each service's log, including the current one
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub log_max_files: u32,
    /// Directory of the containers' logs [default: BASE/pod-logs, or /var/log/pods]
    #[arg(long, value_name = "DIR")]
    pub pod_logs_dir: Option<PathBuf>,
    /// Number of instances of probe-service, which share the pods
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=8))]
    pub probe_instances: u8,
    /// Directory of the services' binaries [default: the directory of quintctl]
    #[arg(long, value_name = "DIR")]
    pub bin_dir: Option<PathBuf>,
    /// Start a private containerd with images made on this machine; its images are not garbage collected
    #[arg(long, conflicts_with = "runtime_endpoint")]
    pub private_containerd: bool,
    /// Socket of the container runtime
    #[arg(long, value_name = "URL", required_unless_present_any = ["private_containerd", "config"])]
    pub runtime_endpoint: Option<String>,
    /// Root of the pods' cgroups [default: /, or a new cgroup with --private-containerd]
    #[arg(long, value_name = "PATH")]
    pub cgroup_root: Option<String>,
    /// Kubeconfig for the API server; without it the node is standalone
    #[arg(long, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// Kubeconfig with a bootstrap token: requests a client certificate if --kubeconfig is missing or has no
    /// valid one, and writes --kubeconfig
    #[arg(long, value_name = "FILE", requires = "kubeconfig")]
    pub bootstrap_kubeconfig: Option<PathBuf>,
    /// Name of the node [default: the host name]
    #[arg(long, alias = "hostname-override", value_parser = node_name, value_name = "NAME")]
    pub node_name: Option<String>,
    /// Port of the node's HTTPS API, which needs --kubeconfig; 0 disables it
    #[arg(long, value_name = "PORT", default_value_t = 10250)]
    pub node_api_port: u16,
    /// Port of the HTTP health endpoint on 127.0.0.1; 0 disables it
    #[arg(long, value_name = "PORT", default_value_t = 10248)]
    pub healthz_port: u16,
    /// CA bundle to verify client certificates of the node API
    #[arg(long, value_name = "FILE")]
    pub client_ca_file: Option<PathBuf>,
    /// Directory of the node API's self-signed certificate
    /// [default: BASE/node-api-pki, or /var/lib/quintlet/pki]
    #[arg(long, value_name = "DIR")]
    pub cert_dir: Option<PathBuf>,
    /// Serving certificate of the node API [default: self-signed]
    #[arg(long, value_name = "FILE", requires = "tls_private_key_file")]
    pub tls_cert_file: Option<PathBuf>,
    /// Private key of the serving certificate; may be readable by root only
    #[arg(long, value_name = "FILE", requires = "tls_cert_file")]
    pub tls_private_key_file: Option<PathBuf>,
    /// User and group ID of pleg-service if quintctl runs as root; 0 is root. Neither distributions nor
    /// systemd assign the default IDs, 65529 to 65533
    #[arg(long, value_name = "UID", default_value_t = 65530, help_heading = "Users")]
    pub pleg_uid: u32,
    /// User and group ID of probe-service if quintctl runs as root; 0 is root
    #[arg(long, value_name = "UID", default_value_t = 65531, help_heading = "Users")]
    pub probe_uid: u32,
    /// User and group ID of status-reporter if quintctl runs as root; 0 is root
    #[arg(long, value_name = "UID", default_value_t = 65532, help_heading = "Users")]
    pub reporter_uid: u32,
    /// User and group ID of the node API if quintctl runs as root; 0 is root
    #[arg(long, value_name = "UID", default_value_t = 65533, help_heading = "Users")]
    pub node_api_uid: u32,
    /// Group ID of the services that watch the health of others: status-reporter and the node API
    #[arg(long, value_name = "GID", default_value_t = 65529, help_heading = "Users")]
    pub watch_gid: u32,
    /// DNS domain of the cluster
    #[arg(long, value_name = "DOMAIN")]
    pub cluster_domain: Option<String>,
    /// Terminate all pods at the end; without it they keep running
    #[arg(long)]
    pub down: bool,
    /// Exit when all pods have settled; exit code 1 if a state differs from the annotation
    /// quintlet.dev/expect
    #[arg(long)]
    pub once: bool,
    /// With --once: time limit for pods to settle, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 180)]
    pub once_timeout: u64,
    /// Log level of the services
    #[arg(long, value_name = "LEVEL", default_value = "info")]
    pub log_level: String,
    /// Log format of the services: text or json
    #[arg(long, value_name = "FORMAT", default_value = "text")]
    pub log_format: String,
    /// OTLP endpoint for the services' traces
    #[arg(long, value_name = "URL")]
    pub otlp_endpoint: Option<String>,
    /// Accepted for consistency with other commands, and without effect
    #[arg(short, long, hide = true, value_enum, default_value_t)]
    pub(crate) output: crate::out::Format,
    /// Arguments that the command line of a kubelet has for services.
    #[arg(skip)]
    pub extra: Vec<ServiceArgument>,
    /// Directory of the certificates that pod-sync requests. Default: `pki` in the root directory.
    #[arg(skip)]
    pub requested_certificates: Option<PathBuf>,
}

/// Longest DNS subdomain, in bytes (`k8s.io/apimachinery/pkg/util/validation: DNS1123SubdomainMaxLength`).
const NODE_NAME_MAX: usize = 253;

/// Parses a node name, which must be a DNS subdomain. The default, which is the host name, is not checked.
fn node_name(given: &str) -> Result<String, String> {
    let name = quintlet_kit::args::node_name(given).map_err(|error| error.to_string())?;
    let is_end = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    let is_part = |part: &str| {
        part.starts_with(is_end) && part.ends_with(is_end) && part.chars().all(|c| is_end(c) || c == '-')
    };
    if name.len() <= NODE_NAME_MAX && name.split('.').all(is_part) {
        return Ok(name);
    }
    Err(format!(
        "not a valid node name: must be lower-case letters, digits, '-' and '.', with a letter or digit at both ends and \
         on both sides of each '.', at most {NODE_NAME_MAX} characters"
    ))
}
