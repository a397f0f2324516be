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
        let flags = vec![
            ("address", args.address.to_string()),
            ("anonymous-auth", args.anonymous_auth.to_string()),
            ("authentication-token-webhook", args.authentication_token_webhook.to_string()),
            ("authorization-mode", format!("{:?}", args.authorization_mode)),
            ("cert-dir", args.cert_dir.display().to_string()),
            ("client-ca-file", path(&args.client_ca_file)),
            ("enable-debugging-handlers", args.enable_debugging_handlers.to_string()),
            ("enable-system-log-handler", args.enable_system_log_handler.to_string()),
            ("healthz-bind-address", args.healthz_bind_address.to_string()),
            ("healthz-port", args.healthz_port.to_string()),
            ("kubeconfig", path(&args.kubeconfig)),
            ("port", args.node_api_port.to_string()),
            ("read-only-port", args.read_only_port.to_string()),
            ("root-dir", args.root_dir.display().to_string()),
            ("run-dir", args.common.run_dir.display().to_string()),
            ("tls-cert-file", path(&args.tls_cert_file)),
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

    /// `/flagz`.
    #[must_use]
    pub fn flagz(&self) -> Answer {
        let lines: Vec<String> = self.flags.iter().map(|(name, value)| format!("{name}={value}")).collect();
        text(StatusCode::OK, format!("\nkubelet flagz\n{WARNING}\n\n{}\n", lines.join("\n")))
    }

    /// `/statusz`.
    #[must_use]
    pub fn statusz(&self, now: jiff::Timestamp, up: Duration) -> Answer {
        let started = now.checked_sub(jiff::SignedDuration::try_from(up).unwrap_or_default()).unwrap_or(now);
        let body = format!(
            "\nkubelet statusz\n{WARNING}\n\nStarted: {started}\nUp: {}\nBinary version: {}\n\
             Paths: /configz /flagz /healthz /metrics /pods /stats/summary\n",
            humantime::format_duration(Duration::from_secs(up.as_secs())),
            env!("CARGO_PKG_VERSION")
        );
        text(StatusCode::OK, body)
    }
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
