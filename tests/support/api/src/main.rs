//! The `testapi` binary: a test API server for scripts.
//!
//! Prints its URL. `GET /testapi/counts` returns the counts of requests. `POST /testapi/faults` with
//! `{"requests": "patch pods/status", "times": 3, "failure": "internal"}` makes requests fail; `DELETE`
//! removes the faults.

use std::io::Write;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use clap::Parser;
use quintlet_testapi::{Options, TestApi, TestSigner};

/// A test API server that behaves as kube-apiserver does towards a node agent. Everything is in memory.
#[derive(Parser)]
struct Args {
    /// Address to listen on; port 0 takes a free one.
    #[arg(long, default_value = "127.0.0.1:0")]
    listen: SocketAddr,
    /// Write a kubeconfig for this server here.
    #[arg(long)]
    kubeconfig: Option<PathBuf>,
    /// Serve HTTPS with a certificate the kubeconfig trusts.
    #[arg(long)]
    tls: bool,
    /// Keep the certificate of --tls and its key in this file, for the next start.
    #[arg(long, requires = "tls")]
    certificate: Option<PathBuf>,
    /// Sign every CertificateSigningRequest.
    #[arg(long)]
    sign: bool,
    /// Begin with the objects of this JSON file: a list of `{"resource", "namespace", "object"}`.
    #[arg(long)]
    objects: Option<PathBuf>,
}

/// Interval between checks for CertificateSigningRequests.
const SIGN_EVERY: Duration = Duration::from_millis(200);

/// Life of the signed certificates.
const LIFE: Duration = Duration::from_hours(24);

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    if let Some(path) = &args.certificate {
        TestApi::keep_certificate(path).with_context(|| format!("certificate in {}", path.display()))?;
    }
    let mut options = Options { listen: args.listen, tls: args.tls, ..Options::default() };
    if let Some(path) = &args.objects {
        let json = std::fs::read(path).with_context(|| format!("read {}", path.display()))?;
        options.objects =
            serde_json::from_slice(&json).with_context(|| format!("objects in {}", path.display()))?;
    }
    let api = TestApi::start_with(options).await.with_context(|| format!("listen on {}", args.listen))?;
    if let Some(path) = &args.kubeconfig {
        api.kubeconfig(path).with_context(|| format!("write {}", path.display()))?;
    }
    writeln!(std::io::stdout(), "{}", api.url()).context("write the URL")?;
    let mut terminate = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
    let sign = async {
        let signer = TestSigner::new();
        loop {
            signer.answer_all(&api, jiff::Timestamp::now(), LIFE);
            tokio::time::sleep(SIGN_EVERY).await;
        }
    };
    tokio::select! {
        () = sign, if args.sign => {}
        interrupted = tokio::signal::ctrl_c() => interrupted?,
        _ = terminate.recv() => {}
    }
    Ok(())
}
