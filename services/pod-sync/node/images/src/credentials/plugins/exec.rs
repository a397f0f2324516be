//! Runs the program of a credential provider plugin.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use quintlet_kit::task::blocking;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _};
use tokio::sync::Semaphore;

use super::account::PluginAccount;
use super::config::ProviderConfig;

/// Timeout of a plugin (`pkg/credentialprovider/plugin: ExecPlugin`).
const LIMIT: Duration = Duration::from_secs(60);
/// Size limit of a response, in bytes. Credentials take a few thousand.
const MAX_ANSWER: u64 = 1 << 20;
/// Concurrent processes of one plugin.
pub(super) const RUNS: usize = 16;
/// Bytes of stderr that an error quotes. The rest is discarded.
const MAX_STDERR: u64 = 256;

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Response {
    pub(super) api_version: String,
    pub(super) kind: String,
    pub(super) cache_key_type: String,
    #[serde(default)]
    pub(super) cache_duration: Option<String>,
    #[serde(default)]
    pub(super) auth: BTreeMap<String, ResponseAuth>,
}

#[derive(Deserialize)]
pub(super) struct ResponseAuth {
    #[serde(default)]
    pub(super) username: String,
    #[serde(default)]
    pub(super) password: String,
}

/// The program of a plugin.
#[derive(Debug)]
pub(super) struct Program {
    pub(super) config: ProviderConfig,
    pub(super) path: PathBuf,
    pub(super) runs: Semaphore,
}

impl Program {
    /// Runs the program with a request on stdin once one of [`RUNS`] slots is free. Returns its output and
    /// exit status. Dropping the call kills the program.
    async fn exchange(
        &self,
        request: String,
    ) -> Result<(Vec<u8>, Vec<u8>, std::process::ExitStatus), String> {
        let text = |e: std::io::Error| e.to_string();
        let _place = self.runs.acquire().await.map_err(|e| e.to_string())?;
        let mut command = tokio::process::Command::new(&self.path);
        command
            .args(&self.config.args)
            .envs(self.config.env.iter().map(|e| (&e.name, &e.value)))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        // The start of a program reads it from the disk.
        let mut child = blocking(move || command.spawn()).await.map_err(text)?;
        let mut stdin = child.stdin.take().ok_or("no stdin")?;
        let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
        let write = async {
            // A program that does not read its request may still respond.
            let _ = stdin.write_all(request.as_bytes()).await;
            drop(stdin);
            Ok::<(), String>(())
        };
        let answer = async {
            let bytes = read(stdout, MAX_ANSWER.saturating_add(1), false).await.map_err(text)?;
            if u64::try_from(bytes.len()).is_ok_and(|length| length > MAX_ANSWER) {
                return Err(format!("response is longer than {MAX_ANSWER} bytes"));
            }
            Ok(bytes)
        };
        let errors = async { read(stderr, MAX_STDERR, true).await.map_err(text) };
        let ((), stdout, stderr) = tokio::try_join!(write, answer, errors)?;
        let status = child.wait().await.map_err(text)?;
        Ok((stdout, stderr, status))
    }

    /// Runs the program to get the credentials of an image.
    pub(super) async fn run(&self, image: &str, account: Option<&PluginAccount>) -> Result<Response, String> {
        let mut request: Value = json!({
            "apiVersion": self.config.api_version, "kind": "CredentialProviderRequest", "image": image,
        });
        if let Some(account) = account {
            request["serviceAccountToken"] = json!(account.token);
            if !account.annotations.is_empty() {
                request["serviceAccountAnnotations"] = json!(account.annotations);
            }
        }
        let work = self.exchange(request.to_string());
        let (stdout, stderr, status) = tokio::time::timeout(LIMIT, work)
            .await
            .map_err(|_| format!("no response within {}s", LIMIT.as_secs()))??;
        if !status.success() {
            return Err(format!("{status}: {}", String::from_utf8_lossy(&stderr).trim()));
        }
        // The output may contain credentials, so only the position of an error is reported.
        let response: Response = serde_json::from_slice(&stdout)
            .map_err(|e| format!("response is malformed at line {} column {}", e.line(), e.column()))?;
        if response.kind != "CredentialProviderResponse" || response.api_version != self.config.api_version {
            return Err(format!("response is {} of {}", response.kind, response.api_version));
        }
        Ok(response)
    }
}

/// Reads at most `most` bytes. With `drops` the rest is read and discarded, so that the writer is never
/// blocked.
async fn read(output: Option<impl AsyncRead + Unpin>, most: u64, drops: bool) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let Some(mut output) = output else { return Ok(bytes) };
    (&mut output).take(most).read_to_end(&mut bytes).await?;
    if drops {
        tokio::io::copy(&mut output, &mut tokio::io::sink()).await?;
    }
    Ok(bytes)
}
