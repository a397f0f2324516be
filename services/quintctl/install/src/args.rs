//! The options of `quintctl install`, `quintctl uninstall` and `quintctl upgrade`.

use std::path::PathBuf;

/// Install Quintlet in the place of a kubelet or beside it; quintctl uninstall undoes it
#[derive(Debug, Clone, clap::Args)]
#[command(group(clap::ArgGroup::new("place").required(true).args(["replace_kubelet", "beside"])))]
pub struct InstallArgs {
    /// Run Quintlet as kubelet.service, with the kubelet's command line and files
    #[arg(long)]
    pub replace_kubelet: bool,
    /// Run Quintlet as a node of its own, with a root directory, ports, a name and a runtime that no kubelet
    /// uses
    #[arg(long, requires = "runtime_endpoint")]
    pub beside: bool,
    /// Show the steps and change nothing
    #[arg(long)]
    pub dry_run: bool,
    /// Directory of the programs of Quintlet [default: the directory of quintctl]
    #[arg(long, value_name = "DIR")]
    pub bin_dir: Option<PathBuf>,
    /// Time limit for the services to become healthy, in seconds; then all is undone
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    pub timeout: u64,
    /// Socket of the container runtime. A kubelet stops the pods of others in its runtime, so it must be
    /// another one
    #[arg(long, value_name = "URL", conflicts_with = "replace_kubelet", help_heading = "Beside a kubelet")]
    pub runtime_endpoint: Option<String>,
    /// Name of the node [default: the host name with -quintlet]
    #[arg(long, value_name = "NAME", conflicts_with = "replace_kubelet", help_heading = "Beside a kubelet")]
    pub node_name: Option<String>,
    /// Configuration file
    #[arg(long, value_name = "FILE", conflicts_with = "replace_kubelet", help_heading = "Beside a kubelet")]
    pub config: Option<PathBuf>,
    /// Kubeconfig for the API server; without it the node is standalone
    #[arg(long, value_name = "FILE", conflicts_with = "replace_kubelet", help_heading = "Beside a kubelet")]
    pub kubeconfig: Option<PathBuf>,
    /// Kubeconfig with a bootstrap token, to request the client certificate of --kubeconfig
    #[arg(
        long,
        value_name = "FILE",
        requires = "kubeconfig",
        conflicts_with = "replace_kubelet",
        help_heading = "Beside a kubelet"
    )]
    pub bootstrap_kubeconfig: Option<PathBuf>,
    /// Port of the HTTPS API
    #[arg(
        long,
        value_name = "PORT",
        default_value_t = 10350,
        conflicts_with = "replace_kubelet",
        help_heading = "Beside a kubelet"
    )]
    pub port: u16,
    /// Port of the health endpoint on 127.0.0.1
    #[arg(
        long,
        value_name = "PORT",
        default_value_t = 10348,
        conflicts_with = "replace_kubelet",
        help_heading = "Beside a kubelet"
    )]
    pub healthz_port: u16,
}

/// Undo quintctl install, also one that was interrupted
#[derive(Debug, Clone, Default, clap::Args)]
pub struct UninstallArgs {
    /// Show the steps and change nothing
    #[arg(long)]
    pub dry_run: bool,
}

/// Replace the binary of the running services, one service after the other; no pod restarts
#[derive(Debug, Clone, clap::Args)]
pub struct UpgradeArgs {
    /// The new binary: the file quintlet of another version
    #[arg(value_name = "BINARY", required_unless_present = "undo", conflicts_with = "undo")]
    pub binary: Option<PathBuf>,
    /// Go back to the old binary after an upgrade that was interrupted
    #[arg(long)]
    pub undo: bool,
    /// Show the steps and change nothing
    #[arg(long)]
    pub dry_run: bool,
    /// Directory of the programs of Quintlet [default: the directory of quintctl]
    #[arg(long, value_name = "DIR")]
    pub bin_dir: Option<PathBuf>,
    /// Time limit for the services to become healthy after each restart, in seconds; then all services go
    /// back to the old binary
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    pub timeout: u64,
}
