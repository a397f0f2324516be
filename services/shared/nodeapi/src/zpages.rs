//! `/configz`, `/statusz`, `/flagz`: how this process is set up.

use std::time::Duration;

use http::StatusCode;
use quintlet_config::Config;
use quintlet_config::node::{Data, Node};
use quintlet_config::print::MASKED;
use quintlet_config::table::Document;
use serde_json::{Value, json};

use crate::answer::{Answer, json as json_answer, text};
use crate::args::NodeApiArgs;

/// What the process was told, for those who ask.
#[derive(Debug)]
pub struct Settings {
    config: Value,
    flags: Vec<(&'static str, String)>,
}

const WARNING: &str = "Warning: This endpoint is not meant to be machine parseable, has no formatting compatibility \
    guarantees and is for debugging purposes only.";

impl Settings {
    /// Of a command line and the configuration behind it.
    #[must_use]
    pub fn new(args: &NodeApiArgs, config: &Config) -> Self {
        let path =
            |p: &Option<std::path::PathBuf>| p.as_ref().map(|p| p.display().to_string()).unwrap_or_default();
        let config = document_json(config, Document::Kubelet);
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
            ("client-ca-file", path(&args.client_ca_file)),
            ("config", path(&args.config.config)),
            ("config-dir", path(&args.config.config_dir)),
            ("enable-debugging-handlers", args.enable_debugging_handlers.to_string()),
            ("enable-server", args.enable_server.to_string()),
            ("enable-system-log-handler", args.enable_system_log_handler.to_string()),
            ("enable-system-log-query", args.enable_system_log_query.to_string()),
            ("feature-gates", args.feature_gates.join(",")),
            ("healthz-bind-address", args.healthz_bind_address.to_string()),
            ("healthz-port", args.healthz_port.to_string()),
            ("hostname-override", args.node_name.clone().unwrap_or_default()),
            ("kubeconfig", path(&args.kubeconfig)),
            ("log-level", args.common.log_level.clone()),
            ("pod-logs-dir", args.pod_logs_dir.display().to_string()),
            ("port", args.node_api_port.to_string()),
            ("read-only-port", args.read_only_port.to_string()),
            ("root-dir", args.root_dir.display().to_string()),
            ("run-dir", args.common.run_dir.display().to_string()),
            ("strict", args.config.strict.to_string()),
            ("system-log-dir", args.system_log_dir.display().to_string()),
            ("tls-cert-file", path(&args.tls_cert_file)),
            ("tls-cipher-suites", args.tls_cipher_suites.join(",")),
            ("tls-curve-preferences", curves.join(",")),
            ("tls-min-version", args.tls_min_version.clone()),
            ("tls-private-key-file", path(&args.tls_private_key_file)),
        ];
        Self { config, flags }
    }

    /// `/configz`.
    #[must_use]
    pub fn configz(&self) -> Answer {
        json_answer(json!({"kubeletconfig": self.config}).to_string())
    }

    /// `/flagz`: as text, or as JSON where that is what is asked for.
    #[must_use]
    pub fn flagz(&self, accept: Option<&str>) -> Answer {
        if let Some(version) = json_version(accept) {
            let flags: serde_json::Map<String, Value> =
                self.flags.iter().map(|(name, value)| ((*name).to_owned(), value.clone().into())).collect();
            return json_answer(versioned("Flagz", version, json!({"flags": flags})).to_string());
        }
        let lines: Vec<String> =
            self.flags.iter().map(|(name, value)| format!("{name}: {value}\n")).collect();
        text(StatusCode::OK, format!("\nkubelet flagz\n{WARNING}\n{}", lines.concat()))
    }

    /// `/statusz`: as text, or as JSON where that is what is asked for.
    #[must_use]
    pub fn statusz(&self, now: jiff::Timestamp, up: Duration, accept: Option<&str>) -> Answer {
        let started = now.checked_sub(jiff::SignedDuration::try_from(up).unwrap_or_default()).unwrap_or(now);
        if let Some(version) = json_version(accept) {
            let status = json!({
                "startTime": started.strftime("%Y-%m-%dT%H:%M:%SZ").to_string(),
                "uptimeSeconds": up.as_secs(),
                "binaryVersion": env!("CARGO_PKG_VERSION"),
                "paths": PATHS,
            });
            return json_answer(versioned("Statusz", version, status).to_string());
        }
        let minutes = up.as_secs() / 60;
        let body = format!(
            "\nkubelet statusz\n{WARNING}\n\nStarted  {}\nUp  {} hr {:02} min {:02} sec\nBinary version  {}\n\
             Paths  {}\n",
            started.strftime("%a %b %e %H:%M:%S UTC %Y"),
            minutes / 60,
            minutes % 60,
            up.as_secs() % 60,
            env!("CARGO_PKG_VERSION"),
            PATHS.join(" ")
        );
        text(StatusCode::OK, body)
    }
}

const PATHS: [&str; 6] = ["/configz", "/flagz", "/healthz", "/metrics", "/pods", "/stats/summary"];

/// The version of the form that a client names, as in `application/json;v=v1beta1;g=config.k8s.io;as=Flagz`; JSON alone means
/// the newest.
fn json_version(accept: Option<&str>) -> Option<&'static str> {
    accept.unwrap_or_default().split(',').find_map(|kind| {
        let mut parts = kind.split(';').map(str::trim);
        if !parts.next()?.eq_ignore_ascii_case("application/json") {
            return None;
        }
        Some(if parts.any(|p| p == "v=v1alpha1") { "v1alpha1" } else { "v1beta1" })
    })
}

fn versioned(kind: &str, version: &str, mut fields: Value) -> Value {
    fields["kind"] = kind.into();
    fields["apiVersion"] = format!("config.k8s.io/{version}").into();
    fields["metadata"] = json!({"name": "kubelet"});
    fields
}

/// One document as JSON; what is not shown is masked.
fn document_json(config: &Config, document: Document) -> Value {
    let mut out = json!({"apiVersion": document.api_version(), "kind": document.kind()});
    for row in document.rows() {
        let Some(value) = config.value(document, row.field) else { continue };
        let mut at = &mut out;
        for key in row.field.split('.') {
            at = &mut at[key];
        }
        *at = value_json(value, row.secret);
    }
    out
}

fn value_json(value: &Node, secret: bool) -> Value {
    match &value.data {
        Data::Map(entries) => entries.iter().map(|e| (e.key.clone(), value_json(&e.value, secret))).collect(),
        Data::List(elements) => elements.iter().map(|e| value_json(e, secret)).collect(),
        Data::Null => Value::Null,
        _ if secret => MASKED.into(),
        Data::Bool(yes) => (*yes).into(),
        Data::Int(number) => (*number).into(),
        Data::Float(number) => (*number).into(),
        Data::Text(text) => text.clone().into(),
    }
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory as _, Parser as _};
    use http_body_util::BodyExt as _;

    use super::*;

    #[tokio::test]
    async fn each_flag_of_the_command_line_is_shown_as_text_and_as_json() {
        let args = NodeApiArgs::parse_from(["node-api", "--tls-cipher-suites=A,B", "--node-name=n1"]);
        let file = b"apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n";
        let config = Config::from_bytes(file, std::path::Path::new("c.yaml"), false).unwrap();
        let settings = Settings::new(&args, &config);
        // Ends the process instead of serving, or tells what the process tells of itself elsewhere.
        let elsewhere = [
            "help",
            "version",
            "print-config",
            "log-format",
            "otlp-endpoint",
            "metrics-listen",
            "observer-uid",
        ];
        let mut wanted: Vec<String> = NodeApiArgs::command()
            .get_arguments()
            .filter_map(|a| a.get_long().map(str::to_owned))
            .filter(|long| !elsewhere.contains(&long.as_str()))
            // Shown under the names that the kubelet has for them.
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
            serde_json::from_str(&body(Some("application/json;v=v1alpha1;g=config.k8s.io;as=Flagz")).await)
                .unwrap();
        assert_eq!((&json["kind"], &json["flags"]["hostname-override"]), (&json!("Flagz"), &json!("n1")));
        assert_eq!(json["apiVersion"], "config.k8s.io/v1alpha1");
        // As a kubelet 1.36.2 wrote it.
        let at = "2026-11-21T21:22:38Z".parse().unwrap();
        let page = settings.statusz(at, Duration::from_secs(242), None).into_body().collect().await.unwrap();
        let page = String::from_utf8(page.to_bytes().to_vec()).unwrap();
        assert!(
            page.contains("\n\nStarted  Sat Nov 21 21:18:36 UTC 2026\nUp  0 hr 04 min 02 sec\n"),
            "{page}"
        );
        let up =
            settings.statusz(jiff::Timestamp::UNIX_EPOCH, Duration::from_secs(3), Some("application/json"));
        let body = up.into_body().collect().await.unwrap().to_bytes();
        let json: Value = serde_json::from_slice(&body).unwrap();
        assert_eq!((&json["kind"], &json["uptimeSeconds"]), (&json!("Statusz"), &json!(3)));
    }
}
