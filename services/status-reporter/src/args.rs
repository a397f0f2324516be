//! Command line of status-reporter.

use std::net::IpAddr;
use std::time::Duration;

use clap::{ArgAction, Parser};
use quintlet_config::ConfigArgs;
use quintlet_kit::args::{CommonArgs, NodeArgs};
use quintlet_kit::rate::Rate;
use serde_json::{Value, json};

use crate::node::cloud::CloudProvider;
use crate::run::NodeReportSettings;

/// Burst of pod writes if only their rate is set (`kubeAPIBurst` of the kubelet).
const POD_BURST: u32 = 100;

/// The only cloud provider that a kubelet knows.
const EXTERNAL: &str = "external";

/// Writes the state of the node to the API server: pod statuses, Node, lease, events, mirror pods.
#[derive(Debug, Clone, Parser)]
#[command(name = "status-reporter", version)]
pub(crate) struct Args {
    /// Directories and telemetry, as for every service.
    #[command(flatten)]
    pub common: CommonArgs,
    /// Configuration files and their precedence over flags.
    #[command(flatten)]
    pub config: ConfigArgs,
    /// Name of the node and the kubeconfig.
    #[command(flatten)]
    pub node: NodeArgs,
    /// Create the Node object if it is not there.
    #[arg(long, default_value_t = true, action = ArgAction::Set, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    pub register_node: bool,
    /// A taint of a Node that is created, `key=value:Effect` or `key:Effect`; may be given more than once.
    #[arg(long, value_delimiter = ',', value_parser = taint, value_name = "TAINT")]
    pub register_with_taints: Vec<Value>,
    /// A label of a Node that is created, `key=value`; may be given more than once.
    #[arg(long, alias = "node-labels", value_delimiter = ',', value_parser = quintlet_config::pair, value_name = "LABEL")]
    pub node_label: Vec<(String, String)>,
    /// spec.providerID of a Node that is created.
    #[arg(long, default_value = "", hide_default_value = true, value_name = "ID")]
    pub provider_id: String,
    /// `external`: a cloud controller initializes a Node that is created, sets its addresses, and removes its
    /// taint.
    #[arg(long, default_value = "", hide_default_value = true, value_parser = ["", EXTERNAL], value_name = "NAME")]
    pub cloud_provider: String,
    /// Address of the node, or one per family, for an annotation that an external cloud provider reads.
    #[arg(long, value_name = "IP", value_delimiter = ',')]
    pub node_ip: Vec<IpAddr>,
    /// A controller attaches volumes to the node, which an annotation of the Node requests.
    #[arg(long, default_value_t = true, action = ArgAction::Set, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    pub enable_controller_attach_detach: bool,
    /// Shortest time between two writes of the Node that are not urgent, with a unit.
    #[arg(long, default_value = "10s", value_parser = humantime::parse_duration, value_name = "DURATION")]
    pub node_status_update_frequency: Duration,
    /// How often an unchanged Node is written, with a unit.
    #[arg(long, default_value = "5m", value_parser = humantime::parse_duration, value_name = "DURATION")]
    pub node_status_report_frequency: Duration,
    /// Duration of the node's lease, in seconds. It is renewed after a quarter of it.
    #[arg(long, default_value_t = 40, value_parser = clap::value_parser!(u32).range(1..), value_name = "SECONDS")]
    pub node_lease_duration_seconds: u32,
    /// Writes of pods per second. Default, and with 0: no limit.
    #[arg(long, value_name = "COUNT")]
    pub kube_api_qps: Option<u32>,
    /// Writes of pods at once before that limit counts [default: 100]
    #[arg(long, value_name = "COUNT")]
    pub kube_api_burst: Option<u32>,
    /// Events written per second. 0: no limit.
    #[arg(long, default_value_t = 50, value_name = "COUNT")]
    pub event_qps: u32,
    /// Events written at once before that limit counts.
    #[arg(long, default_value_t = 100, value_name = "COUNT")]
    pub event_burst: u32,
}

impl Args {
    /// Returns the settings of the node and of rates.
    #[must_use]
    pub(crate) fn settings(&self) -> NodeReportSettings {
        NodeReportSettings {
            taints: self.register_with_taints.clone(),
            labels: self.node_label.clone(),
            provider_id: self.provider_id.clone(),
            cloud: match self.cloud_provider.as_str() {
                EXTERNAL => CloudProvider::External { node_ips: self.node_ip.clone() },
                _ => CloudProvider::None,
            },
            controller_attaches: self.enable_controller_attach_detach,
            update_every: self.node_status_update_frequency,
            report_every: self.node_status_report_frequency,
            lease_seconds: self.node_lease_duration_seconds,
            pods: Rate::new(self.kube_api_qps.unwrap_or(0), self.kube_api_burst.unwrap_or(POD_BURST)),
            events: Rate::new(self.event_qps, self.event_burst),
        }
    }
}

/// Parses a v1 Taint.
fn taint(text: &str) -> Result<Value, String> {
    const WANT: &str = "want key=value:Effect or key:Effect";
    let (rest, effect) = text.split_once(':').ok_or(WANT)?;
    if !["NoSchedule", "PreferNoSchedule", "NoExecute"].contains(&effect) {
        return Err("the effect has to be NoSchedule, PreferNoSchedule or NoExecute".to_owned());
    }
    let (key, value) = rest.split_once('=').unwrap_or((rest, ""));
    if key.is_empty() {
        return Err(WANT.to_owned());
    }
    Ok(if value.is_empty() {
        json!({"key": key, "effect": effect})
    } else {
        json!({"key": key, "value": value, "effect": effect})
    })
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;
    use quintlet_config::table::Service;

    use super::*;

    fn args(file: &str, flags: &[&str]) -> Args {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c.yaml");
        std::fs::write(&path, file).unwrap();
        let start = ["status-reporter", "--config", path.to_str().unwrap()];
        let line = start.into_iter().chain(flags.iter().copied()).map(Into::into).collect();
        quintlet_config::read::<Args>(Service::StatusReporter, line).unwrap().args
    }

    #[test]
    fn the_table_of_fields_and_the_flags_are_the_same() {
        Args::command().debug_assert();
        assert_eq!(
            quintlet_testkit::command_line::differences(&Args::command(), Service::StatusReporter),
            [""; 0]
        );
    }

    #[test]
    fn fields_of_the_file_arrive() {
        let file = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n\
                    registerNode: false\nenableControllerAttachDetach: false\nregisterWithTaints: [{key: a, value: b, effect: NoSchedule}, {key: c, effect: NoExecute}]\n\
                    providerID: x://1\nnodeStatusUpdateFrequency: 3s\nnodeLeaseDurationSeconds: 20\nkubeAPIQPS: 5\n\
                    eventRecordQPS: 0\n---\napiVersion: quintlet.dev/v1alpha1\nkind: QuintletConfiguration\n\
                    kubeconfig: /k\nnodeName: N1\nnodeLabels: {tier: edge}\n";
        let args = args(file, &["--event-burst", "7"]);
        assert_eq!(
            (args.node.kubeconfig.clone(), args.node.node_name.as_deref()),
            (Some("/k".into()), Some("n1"))
        );
        assert!(!args.register_node && !args.settings().controller_attaches);
        let settings = args.settings();
        assert_eq!(
            settings.taints,
            [
                json!({"key": "a", "value": "b", "effect": "NoSchedule"}),
                json!({"key": "c", "effect": "NoExecute"})
            ]
        );
        assert_eq!(settings.labels, [("tier".to_owned(), "edge".to_owned())]);
        assert_eq!(settings.provider_id, "x://1");
        assert_eq!(settings.update_every, Duration::from_secs(3));
        assert_eq!(settings.report_every, Duration::from_secs(3), "follows the other");
        assert_eq!(settings.lease_seconds, 20);
        assert_eq!(settings.pods, Rate::new(5, POD_BURST));
        assert_eq!(settings.events, None, "0 is no limit");
        let plain =
            self::args("apiVersion: quintlet.dev/v1alpha1\nkind: QuintletConfiguration\n", &[]).settings();
        assert_eq!((plain.pods, plain.events), (None, Rate::new(50, 100)));
    }

    #[test]
    fn only_an_external_cloud_provider_is_known() {
        let file = "apiVersion: quintlet.dev/v1alpha1\nkind: QuintletConfiguration\nnodeIPs: [10.0.0.1, \"fd00::1\"]\n";
        let cloud = |flags: &[&str]| args(file, flags).settings().cloud;
        assert_eq!(cloud(&[]), CloudProvider::None);
        assert_eq!(cloud(&["--cloud-provider="]), CloudProvider::None);
        let node_ips = ["10.0.0.1", "fd00::1"].map(|ip| ip.parse().unwrap()).to_vec();
        assert_eq!(cloud(&["--cloud-provider=external"]), CloudProvider::External { node_ips });
        assert!(Args::try_parse_from(["status-reporter", "--cloud-provider=aws"]).is_err());
    }

    #[test]
    fn taints_are_parsed_as_in_the_kubelet() {
        for bad in ["", "a", "a=b", "a:", ":NoSchedule", "a:Never"] {
            assert!(taint(bad).is_err(), "{bad}");
        }
    }
}
