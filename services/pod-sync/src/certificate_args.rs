//! Flags of the certificates of the node.

use std::path::PathBuf;

use clap::ArgAction;

/// How the node gets and renews its certificates.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Certificates of the node")]
pub struct CertificateArgs {
    /// Kubeconfig with a bootstrap token. It requests a client certificate if --kubeconfig is missing or has
    /// no valid one, and --kubeconfig is written.
    #[arg(long, value_name = "FILE")]
    pub bootstrap_kubeconfig: Option<PathBuf>,
    /// Directory of the certificates that are requested.
    #[arg(long, default_value = "/var/lib/kubelet/pki", value_name = "DIR")]
    pub cert_dir: PathBuf,
    /// Request another client certificate after 70 to 90 percent of its life.
    #[arg(long, action = ArgAction::Set, num_args = 0..=1, default_missing_value = "true", default_value_t = false, value_name = "BOOL")]
    pub rotate_certificates: bool,
    /// Request the serving certificate of the node API from the API server, and renew it.
    #[arg(long, action = ArgAction::Set, num_args = 0..=1, default_missing_value = "true", default_value_t = false, value_name = "BOOL")]
    pub rotate_server_certificates: bool,
}
