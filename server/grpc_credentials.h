#pragma once

#include <grpcpp/security/server_credentials.h>

#include <memory>

namespace k3 {

class TlsStore;

// Credentials of a listener: plain without a store, else TLS whose certificate is asked of the store at each handshake,
// so that a reload holds for new connections without a restart. The store and the credentials must outlive
// the server: gRPC keeps only a reference to what is inside.
std::shared_ptr<grpc::ServerCredentials> MakeServerCredentials(const TlsStore* tls);

}  // namespace k3
