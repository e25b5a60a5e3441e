#include "engine/socket_communicator.h"

#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/core/error.h"
#include "kernels/core/tree_sum.h"

namespace k3 {
namespace {

constexpr auto kPatience = std::chrono::seconds(60);  // for the other processes to come

std::string_view Bytes(const void* data, size_t size) { return {static_cast<const char*>(data), size}; }

std::string SumOf(const std::vector<std::string>& inputs, size_t offset, int64_t count) {
  std::string sum(static_cast<size_t>(count) * sizeof(float), '\0');
  const auto part = [&](int j) {
    return reinterpret_cast<const float*>(inputs[static_cast<size_t>(j)].data() + offset);
  };
  TreeSum(part, static_cast<int>(inputs.size()), 0, count, reinterpret_cast<float*>(sum.data()));
  return sum;
}

}  // namespace

std::unique_ptr<Communicator> SocketCommunicator::Join(int rank, int size, int port) {
  std::unique_ptr<ProcessListener> listener;
  if (rank == 0 && size > 1) {
    auto listening = ProcessListener::Listen(port);
    if (!listening.ok()) throw DeviceError(std::string(listening.status().message()));
    listener = *std::move(listening);
  }
  return Join(rank, size, port, std::move(listener));
}

std::unique_ptr<SocketCommunicator> SocketCommunicator::Join(int rank, int size, int port,
                                                             std::unique_ptr<ProcessListener> listener) {
  std::unique_ptr<SocketCommunicator> comm(new SocketCommunicator(rank, size));
  if (size == 1) return comm;
  if (rank > 0) {
    auto link = ProcessLink::Connect("127.0.0.1", port, kPatience);
    if (!link.ok()) throw DeviceError(std::string(link.status().message()));
    comm->links_.push_back(*std::move(link));
    if (absl::Status sent = comm->links_[0]->Send(static_cast<uint32_t>(Op::kHello), Bytes(&rank, sizeof rank));
        !sent.ok()) {
      comm->Fail(sent, 0);
    }
    return comm;
  }
  comm->links_.resize(static_cast<size_t>(size));
  for (int joined = 1; joined < size; ++joined) {
    auto link = listener->Accept(kPatience);
    if (!link.ok()) {
      throw DeviceError(absl::StrCat(joined, " of ", size, " ranks came: ", std::string(link.status().message())));
    }
    const auto hello = (*link)->Receive(kPatience);
    int peer = -1;
    if (hello.ok() && hello->bytes.size() == sizeof peer) std::memcpy(&peer, hello->bytes.data(), sizeof peer);
    if (peer < 1 || peer >= size || comm->links_[static_cast<size_t>(peer)] != nullptr) {
      throw DeviceError(absl::StrCat("a stray connection, or rank ", peer, " twice"));
    }
    comm->links_[static_cast<size_t>(peer)] = *std::move(link);
  }
  return comm;
}

void SocketCommunicator::Fail(const absl::Status& status, int peer) {
  Check();  // an abort is the better reason
  const std::string why = absl::StrCat("rank ", peer, " of ", size(), ": ", std::string(status.message()));
  Abort(why);
  throw DeviceError("communication ended: " + why);
}

template <typename Answer>
std::string SocketCommunicator::Exchange(Op op, std::string_view in, const Answer& answer) {
  Check();
  const uint32_t kind = static_cast<uint32_t>(op);
  if (rank() > 0) {
    if (absl::Status sent = links_[0]->Send(kind, in); !sent.ok()) Fail(sent, 0);
    auto reply = links_[0]->Receive();
    if (!reply.ok()) Fail(reply.status(), 0);
    return std::move(reply->bytes);
  }
  std::vector<std::string> inputs(static_cast<size_t>(size()));
  inputs[0] = in;
  for (int peer = 1; peer < size(); ++peer) {
    auto message = links_[static_cast<size_t>(peer)]->Receive();
    if (!message.ok()) Fail(message.status(), peer);
    if (message->kind != kind) Fail(absl::InternalError("entered another operation"), peer);
    inputs[static_cast<size_t>(peer)] = std::move(message->bytes);
  }
  for (int peer = 1; peer < size(); ++peer) {
    if (absl::Status sent = links_[static_cast<size_t>(peer)]->Send(kind, answer(inputs, peer)); !sent.ok()) {
      Fail(sent, peer);
    }
  }
  return answer(inputs, 0);
}

void SocketCommunicator::DoAllReduce(float* data, int64_t count) {
  const size_t bytes = static_cast<size_t>(count) * sizeof(float);
  std::string sum;
  const std::string result = Exchange(Op::kAllReduce, Bytes(data, bytes), [&](const auto& inputs, int) {
    if (sum.empty()) sum = SumOf(inputs, 0, count);
    return sum;
  });
  std::memcpy(data, result.data(), bytes);
}

void SocketCommunicator::DoAllGather(const void* in, void* out, size_t bytes) {
  const std::string result = Exchange(Op::kAllGather, Bytes(in, bytes), [](const auto& inputs, int) {
    std::string all;
    for (const std::string& input : inputs) all += input;
    return all;
  });
  std::memcpy(out, result.data(), result.size());
}

void SocketCommunicator::DoReduceScatter(const float* in, float* out, int64_t count) {
  const size_t bytes = static_cast<size_t>(count) * sizeof(float);
  const std::string result =
      Exchange(Op::kReduceScatter, Bytes(in, bytes * static_cast<size_t>(size())),
               [&](const auto& inputs, int peer) { return SumOf(inputs, bytes * static_cast<size_t>(peer), count); });
  std::memcpy(out, result.data(), bytes);
}

void SocketCommunicator::DoAllToAll(const void* in, void* out, size_t bytes) {
  const std::string result =
      Exchange(Op::kAllToAll, Bytes(in, bytes * static_cast<size_t>(size())), [&](const auto& inputs, int peer) {
        std::string blocks;
        for (const std::string& input : inputs) {
          blocks += input.substr(bytes * static_cast<size_t>(peer), bytes);
        }
        return blocks;
      });
  std::memcpy(out, result.data(), result.size());
}

void SocketCommunicator::DoAllToAllRows(const void* in, void* out, int64_t rows, size_t row_bytes, const int32_t* sent,
                                        int32_t* received) {
  // Counts for all, then their rows one after the other; an answer is the same of one rank's blocks.
  const size_t counts = static_cast<size_t>(size()) * sizeof(int32_t);
  const size_t block = static_cast<size_t>(rows) * row_bytes;
  std::string packed(Bytes(sent, counts));
  for (int peer = 0; peer < size(); ++peer) {
    packed += Bytes(static_cast<const char*>(in) + static_cast<size_t>(peer) * block,
                    static_cast<size_t>(sent[peer]) * row_bytes);
  }
  const std::string result = Exchange(Op::kAllToAllRows, packed, [&](const auto& inputs, int peer) {
    std::string head, body;
    for (const std::string& input : inputs) {
      const auto count = [&](int r) {
        int32_t value = 0;
        std::memcpy(&value, input.data() + static_cast<size_t>(r) * sizeof value, sizeof value);
        return static_cast<size_t>(value);
      };
      size_t offset = counts;
      for (int r = 0; r < peer; ++r) offset += count(r) * row_bytes;
      head += input.substr(static_cast<size_t>(peer) * sizeof(int32_t), sizeof(int32_t));
      body += input.substr(offset, count(peer) * row_bytes);
    }
    return head + body;
  });
  size_t offset = counts;
  for (int r = 0; r < size(); ++r) {
    int32_t count = 0;
    std::memcpy(&count, result.data() + static_cast<size_t>(r) * sizeof count, sizeof count);
    if (received != nullptr) received[r] = count;
    const size_t bytes = static_cast<size_t>(count) * row_bytes;
    if (bytes > 0) std::memcpy(static_cast<char*>(out) + static_cast<size_t>(r) * block, result.data() + offset, bytes);
    offset += bytes;
  }
}

void SocketCommunicator::DoBroadcast(void* data, size_t bytes, int root) {
  const std::string result = Exchange(Op::kBroadcast, rank() == root ? Bytes(data, bytes) : std::string_view(),
                                      [root](const auto& inputs, int) { return inputs[static_cast<size_t>(root)]; });
  std::memcpy(data, result.data(), std::min(bytes, result.size()));
}

std::unique_ptr<Communicator> SocketCommunicator::Split(int color, int key) {
  struct Asked {
    int color, key, port;
  };
  std::vector<Asked> all(static_cast<size_t>(size()));
  // Everybody listens, since anybody may turn out to be the first of his group.
  auto listener = ProcessListener::Listen(0);
  if (!listener.ok()) throw DeviceError(std::string(listener.status().message()));
  const Asked own{color, key, (*listener)->port()};
  AllGather(&own, all.data(), sizeof own, nullptr);
  int members = 0, place = 0, port = own.port, first_key = key, first_rank = rank();
  for (int r = 0; r < size(); ++r) {
    const Asked& other = all[static_cast<size_t>(r)];
    if (other.color != color) continue;
    ++members;
    place += other.key < key || (other.key == key && r < rank());
    if (other.key < first_key || (other.key == first_key && r < first_rank)) {
      first_key = other.key;
      first_rank = r;
      port = other.port;
    }
  }
  return Join(place, members, port, *std::move(listener));
}

void SocketCommunicator::Abort(const std::string& why) noexcept {
  {
    std::lock_guard lock(mutex_);
    if (!aborted_.empty()) return;
    aborted_ = why;
  }
  for (const auto& link : links_) {
    if (link != nullptr) link->Close();
  }
}

void SocketCommunicator::Check() {
  std::lock_guard lock(mutex_);
  if (!aborted_.empty()) throw DeviceError("communication ended: " + aborted_);
}

}  // namespace k3
