//! `/configz`: the configuration of all services. `/statusz` and `/flagz`: the state and flags of this
//! process.
//!
//! The last two are as in Kubernetes 1.36 (`staging/src/k8s.io/apiserver/pkg/server/statusz` and `flagz`):
//! text for people, and objects of `config.k8s.io` for clients that name version and kind.

use std::collections::BTreeMap;
use std::time::Duration;

use http::StatusCode;
use node_api_base::answer::{Answer, json as json_answer, text};
use node_api_base::services::Services;
use parking_lot::Mutex;
use quintlet_config::table::{Document, Service};
use quintlet_config::{Config, json as config_json};
use serde_json::{Value, json};

use crate::args::NodeApiArgs;
use crate::negotiate::Form;

/// The pages about the command line and configuration of this process, and the configurations of the others.
#[derive(Debug)]
pub(crate) struct DebugPages {
    config: Value,
    /// The last configuration of each other service, by name.
    others: Mutex<BTreeMap<&'static str, Value>>,
    flags: Vec<(&'static str, String)>,
}

const WARNING: &str = "Warning: This endpoint is not meant to be machine parseable, has no formatting compatibility \
    guarantees and is for debugging purposes only.";

impl DebugPages {
    /// Creates the pages from a command line and its configuration.
    #[must_use]
    pub(crate) fn new(args: &NodeApiArgs, config: &Config) -> Self {
        let path =
            |p: &Option<std::path::PathBuf>| p.as_ref().map(|p| p.display().to_string()).unwrap_or_default();
        let config = config_json::document(config, Document::Kubelet, |_| true);
        let seconds = |d: Duration| humantime::format_duration(d).to_string();
        let curves: Vec<String> = args.tls_curve_preferences.iter().map(u16::to_string).collect();
        let flags = vec![
            ("address", args.address.to_string()),
            ("anonymous-auth", args.anonymous_auth.to_string()),
            ("authentication-token-webhook", args.authentication_token_webhook.to_string()),
            ("authentication-token-webhook-cache-ttl", seconds(args.authentication_token_webhook_cache_ttl)),
            ("authorization-mode", format!("{:?}", args.authorization_mode)),
            (
                "authorization-webhook-cache-authorized-ttl",
                seconds(args.authorization_webhook_cache_authorized_ttl),
            ),
            (
                "authorization-webhook-cache-unauthorized-ttl",
                seconds(args.authorization_webhook_cache_unauthorized_ttl),
            ),
            ("cert-dir", args.cert_dir.display().to_string()),
            ("cgroup-root", args.cgroup_root.clone()),
            ("kubelet-cgroups", args.kubelet_cgroups.clone()),
            ("runtime-cgroups", args.runtime_cgroups.clone()),
            ("system-cgroups", args.system_cgroups.clone()),
            ("client-ca-file", path(&args.client_ca_file)),
            ("config", path(&args.config.config)),
            ("config-dir", path(&args.config.config_dir)),
            ("enable-debug-flags-handler", args.enable_debug_flags_handler.to_string()),
            ("enable-debugging-handlers", args.enable_debugging_handlers.to_string()),
            ("enable-profiling-handler", args.enable_profiling_handler.to_string()),
            ("enable-server", args.enable_server.to_string()),
            ("enable-system-log-handler", args.enable_system_log_handler.to_string()),
            ("enable-system-log-query", args.enable_system_log_query.to_string()),
            ("feature-gates", args.feature_gates.join(",")),
            ("healthz-bind-address", args.healthz_bind_address.to_string()),
            ("healthz-port", args.healthz_port.to_string()),
            ("hostname-override", args.node.node_name.clone().unwrap_or_default()),
            ("issued-certificate-file", path(&args.issued_certificate_file)),
            ("kubeconfig", path(&args.node.kubeconfig)),
            ("log-level", args.common.log_level.clone()),
            ("pod-logs-dir", args.pod_logs_dir.display().to_string()),
            ("port", args.node_api_port.to_string()),
            ("read-only-port", args.read_only_port.to_string()),
            ("root-dir", args.root_dir.display().to_string()),
            ("rotate-server-certificates", args.rotate_server_certificates.to_string()),
            ("run-dir", args.common.run_dir.display().to_string()),
            ("strict", args.config.strict.to_string()),
            ("subscriber-cert-file", path(&args.subscriber_cert_file)),
            ("subscriber-client-ca-file", path(&args.subscriber_client_ca_file)),
            ("subscriber-key-file", path(&args.subscriber_key_file)),
            (
                "subscriber-listen",
                args.subscriber_listen.map(|address| address.to_string()).unwrap_or_default(),
            ),
            ("subscriber-name", args.subscriber_name.join(",")),
            ("system-log-dir", args.system_log_dir.display().to_string()),
            ("tls-cert-file", path(&args.tls_cert_file)),
            ("tls-cipher-suites", args.tls_cipher_suites.join(",")),
            ("tls-curve-preferences", curves.join(",")),
            ("tls-min-version", args.tls_min_version.clone()),
            ("tls-private-key-file", path(&args.tls_private_key_file)),
        ];
        Self { config, others: Mutex::default(), flags }
    }

    /// Responds to `/configz`: the combined configuration of all services. Services may have different flags,
    /// so each is asked for the fields that it honours. For one that does not answer, its last answer is
    /// used, or else the configuration of this process.
    pub(crate) async fn configz(&self, node: &Services) -> Answer {
        let others = Service::ALL.into_iter().filter(|service| *service != Service::NodeApi);
        let sources = node.sources().await;
        let from_accept = others.filter_map(|service| {
            let source = sources.iter().find(|source| source.service == service.name())?;
            Some(async move { (service, node.configuration(source).await) })
        });
        let mut out = self.config.clone();
        for (service, answer) in futures::future::join_all(from_accept).await {
            let mut others = self.others.lock();
            if let Ok(text) = answer
                && let Ok(theirs) = serde_json::from_str(&text)
            {
                others.insert(service.name(), theirs);
            }
            if let Some(theirs) = others.get(service.name()) {
                config_json::take(&mut out, theirs, Document::Kubelet, service);
            }
        }
        config_json::take(&mut out, &self.config, Document::Kubelet, Service::NodeApi);
        json_answer(json!({"kubeletconfig": out}).to_string())
    }

    /// Responds to `/flagz`.
    #[must_use]
    pub(crate) fn flagz(&self, accept: Option<&str>) -> Answer {
        match Form::from_accept(accept, "Flagz") {
            Form::Text => {
                let lines: String =
                    self.flags.iter().map(|(name, value)| format!("{name}: {value}\n")).collect();
                text(StatusCode::OK, format!("\nkubelet flagz\n{WARNING}\n{lines}"))
            }
            form => {
                let flags: serde_json::Map<String, Value> =
                    self.flags.iter().map(|(name, value)| ((*name).to_owned(), json!(value))).collect();
                form.answer("Flagz", json!({"flags": flags}))
            }
        }
    }

    /// Responds to `/statusz`.
    #[must_use]
    pub(crate) fn statusz(&self, now: jiff::Timestamp, up: Duration, accept: Option<&str>) -> Answer {
        let started = now.checked_sub(jiff::SignedDuration::try_from(up).unwrap_or_default()).unwrap_or(now);
        let (version, seconds) = (env!("CARGO_PKG_VERSION"), up.as_secs());
        match Form::from_accept(accept, "Statusz") {
            Form::Text => {
                let body = format!(
                    "\nkubelet statusz\n{WARNING}\n\nStarted  {}\nUp  {} hr {:02} min {:02} sec\nGo version  {GO}\n\
                     Binary version  {version}\nEmulation version  {EMULATED}\nPaths  {}\n",
                    started.strftime("%a %b %e %H:%M:%S UTC %Y"),
                    seconds / 3600,
                    seconds / 60 % 60,
                    seconds % 60,
                    PATHS.join(" ")
                );
                text(StatusCode::OK, body)
            }
            form => {
                let status = json!({
                    "startTime": started.strftime("%Y-%m-%dT%H:%M:%SZ").to_string(),
                    "uptimeSeconds": seconds,
                    "goVersion": GO,
                    "binaryVersion": version,
                    "emulationVersion": EMULATED,
                    "paths": PATHS,
                });
                form.answer("Statusz", status)
            }
        }
    }
}

/// Group of the objects.
const EMULATED: &str = quintlet_model::kubernetes::MINOR_VERSION;
/// Value of the required field for the version of Go: this process is not built with Go.
const GO: &str = "";
/// Paths that `/statusz` lists. The kubelet also lists `/debug`.
const PATHS: [&str; 4] = ["/configz", "/flagz", "/healthz", "/metrics"];

#[cfg(test)]
mod tests {
    use clap::{CommandFactory as _, Parser as _};
    use http_body_util::BodyExt as _;

    use super::*;

    #[tokio::test]
    async fn flagz_has_each_flag_as_text_and_as_json() {
        let args = NodeApiArgs::parse_from(["node-api", "--tls-cipher-suites=A,B", "--node-name=n1"]);
        let file = b"apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n";
        let config = Config::from_bytes(file, std::path::Path::new("c.yaml"), false).unwrap();
        let settings = DebugPages::new(&args, &config);
        // Flags that end the process, or that are reported elsewhere.
        let elsewhere = [
            "help",
            "version",
            "print-config",
            "log-format",
            "otlp-endpoint",
            "sampling-rate-per-million",
            "metrics-listen",
            "observer-uid",
        ];
        let mut wanted: Vec<String> = NodeApiArgs::command()
            .get_arguments()
            .filter_map(|a| a.get_long().map(str::to_owned))
            .filter(|long| !elsewhere.contains(&long.as_str()))
            // Shown under the kubelet's names.
            .map(|long| match long.as_str() {
                "node-name" => "hostname-override".to_owned(),
                "node-api-port" => "port".to_owned(),
                _ => long,
            })
            .collect();
        wanted.sort();
        let body = async |accept| {
            let body = settings.flagz(accept).into_body().collect().await.unwrap().to_bytes();
            String::from_utf8(body.to_vec()).unwrap()
        };
        let text = body(None).await;
        let mut shown: Vec<&str> = text.lines().skip(3).filter_map(|l| Some(l.split_once(": ")?.0)).collect();
        shown.sort_unstable();
        assert_eq!(shown, wanted);
        assert!(text.contains("\ntls-cipher-suites: A,B\n"), "{text}");
        let json: Value =
            serde_json::from_str(&body(Some("application/json;v=v1beta1;g=config.k8s.io;as=Flagz")).await)
                .unwrap();
        assert_eq!(json["flags"]["hostname-override"], "n1");
        assert_eq!(json["flags"].as_object().unwrap().len(), shown.len());
    }

    #[tokio::test]
    async fn statusz_has_the_fields_and_the_format_of_the_kubelet() {
        let args = NodeApiArgs::parse_from(["node-api"]);
        let file = b"apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n";
        let config = Config::from_bytes(file, std::path::Path::new("c.yaml"), false).unwrap();
        let settings = DebugPages::new(&args, &config);
        let now = "2026-11-21T20:15:16.5Z".parse().unwrap();
        let body = async |accept| {
            let answer = settings.statusz(now, Duration::from_secs(3 * 3600 + 62), accept);
            let body = answer.into_body().collect().await.unwrap().to_bytes();
            String::from_utf8(body.to_vec()).unwrap()
        };
        let version = env!("CARGO_PKG_VERSION");
        let want = format!(
            "\nkubelet statusz\nWarning: This endpoint is not meant to be machine parseable, has no formatting compatibility \
             guarantees and is for debugging purposes only.\n\nStarted  Sat Nov 21 17:14:14 UTC 2026\n\
             Up  3 hr 01 min 02 sec\nGo version  \nBinary version  {version}\nEmulation version  {EMULATED}\n\
             Paths  /configz /flagz /healthz /metrics\n"
        );
        assert_eq!(body(None).await, want);
        let json: Value =
            serde_json::from_str(&body(Some("application/json;as=Statusz;v=v1beta1;g=config.k8s.io")).await)
                .unwrap();
        let want = json!({
            "kind": "Statusz", "apiVersion": "config.k8s.io/v1beta1", "metadata": {"name": "kubelet"},
            "startTime": "2026-11-21T17:14:14Z", "uptimeSeconds": 10862, "goVersion": "", "binaryVersion": version,
            "emulationVersion": EMULATED, "paths": ["/configz", "/flagz", "/healthz", "/metrics"],
        });
        assert_eq!(json, want);
    }
}
