//! One self-signed certificate per process, for 127.0.0.1 and localhost.

use std::sync::{Arc, OnceLock};

use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};

struct Identity {
    pem: String,
    config: Arc<ServerConfig>,
}

fn identity() -> &'static Identity {
    static IDENTITY: OnceLock<Identity> = OnceLock::new();
    IDENTITY.get_or_init(|| {
        let names = vec!["127.0.0.1".to_owned(), "localhost".to_owned()];
        let made =
            rcgen::generate_simple_self_signed(names).expect("a certificate for fixed names can be made");
        let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(made.signing_key.serialize_der()));
        let provider = Arc::new(quintlet_kit::crypto::provider());
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .expect("the provider has the default versions")
            .with_no_client_auth()
            .with_single_cert(vec![made.cert.der().clone()], key)
            .expect("the key belongs to the certificate");
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        Identity { pem: made.cert.pem(), config: Arc::new(config) }
    })
}

/// Returns the certificate to trust, as PEM.
pub(crate) fn placeholder_ca() -> &'static str {
    &identity().pem
}

pub(crate) fn acceptor() -> TlsAcceptor {
    TlsAcceptor::from(identity().config.clone())
}
