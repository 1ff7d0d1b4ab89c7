// UTF-8, Unicode properties, normalization, added tokens: tables of inputs and expected outputs.

#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "wordpiece/added_tokens.h"
#include "wordpiece/char_table.h"
#include "wordpiece/normalizer.h"
#include "wordpiece/utf8.h"
#include "wordpiece_check.h"

namespace wp = bert_fast::wordpiece;

namespace {

void test_utf8_round_trip() {
  for (char32_t c = 0; c < 0x110000; ++c) {
    if (c >= 0xD800 && c <= 0xDFFF) continue;
    char bytes[4];
    const std::size_t size = wp::encode_utf8(c, bytes);
    const char* p = bytes;
    CHECK(wp::decode_utf8(p) == c && p == bytes + size);
    CHECK(wp::utf8_length(static_cast<unsigned char>(bytes[0])) == size);
    CHECK(wp::valid_utf8_prefix({bytes, size}) == size);
  }
}

void test_utf8_repair() {
  const std::string r = "\xEF\xBF\xBD";  // U+FFFD
  const struct {
    std::string bytes, repaired;
  } cases[] = {
      {"plain", "plain"},
      {"\xC3\xA9", "\xC3\xA9"},
      {"\x80", r},                          // continuation without a lead
      {"a\xC3", "a" + r},                   // cut off
      {"\xE2\x82", r},                      // cut off after two of three: one part
      {"\xE2\x82z", r + "z"},               // interrupted
      {"\xF0\x9F\x98", r},                  // cut off after three of four: one part
      {"\xC0\xAF", r + r},                  // overlong: the lead is invalid by itself
      {"\xE0\x80\xAF", r + r + r},          // overlong
      {"\xED\xA0\x80", r + r + r},          // a surrogate
      {"\xF4\x90\x80\x80", r + r + r + r},  // beyond U+10FFFF
      {"\xF1\x80\x80\xE1\x80\xC2"
       "b\x80"
       "c\x80\xBF"
       "d",
       r + r + r + "b" + r + "c" + r + r + "d"},  // standard, 3-11
      {"eight by\xFFte words", "eight by" + r + "te words"},
  };
  for (const auto& c : cases) {
    std::string storage;
    CHECK(wp::to_utf8(wordpiece_test::utf8_view(c.bytes), storage) == c.repaired);
  }
}

void test_fixed_width_forms() {
  std::string storage;
  const unsigned char latin[] = {'a', 0xE9, 0xFF};
  CHECK(wp::to_utf8({latin, 3, wp::TextView::Form::kUcs1}, storage) == "a\xC3\xA9\xC3\xBF");
  const char16_t two[] = {u'a', 0xD800, 0x20AC, 0xDFFF};
  CHECK(wp::to_utf8({two, 4, wp::TextView::Form::kUcs2}, storage) == "a\xEF\xBF\xBD\xE2\x82\xAC\xEF\xBF\xBD");
  const char32_t four[] = {0x1F600, 0xDC00, 0x10FFFF};
  CHECK(wp::to_utf8({four, 3, wp::TextView::Form::kUcs4}, storage) == "\xF0\x9F\x98\x80\xEF\xBF\xBD\xF4\x8F\xBF\xBF");
  CHECK(wp::to_utf8({four, 0, wp::TextView::Form::kUcs4}, storage).empty());
}

void test_properties() {
  CHECK(wp::is_whitespace(U' ') && wp::is_whitespace(0x2028) && wp::is_whitespace(0x85) && !wp::is_whitespace(0x200B));
  CHECK(wp::is_control(0) && wp::is_control(0xFFFD) && wp::is_control(0x200B) && !wp::is_control(U'\t'));
  CHECK(wp::is_punctuation(U'$') && wp::is_punctuation(0x3002) && !wp::is_punctuation(0x20AC));
  CHECK(wp::is_cjk(0x4E00) && wp::is_cjk(0x2F800) && !wp::is_cjk(0x2B820) && !wp::is_cjk(0x3042));  // as the library
  CHECK(wp::is_mark(0x301) && !wp::is_mark(0x903) && wp::combining_class(0x301) == 230);
  CHECK(wp::is_word_character(U'_') && wp::is_word_character(0x301) && !wp::is_word_character(U'-'));
  const wp::Mapping jamo = wp::decompose(0xAC01);
  CHECK(jamo.size == 3 && jamo.chars[0] == 0x1100 && jamo.chars[1] == 0x1161 && jamo.chars[2] == 0x11A8);
  CHECK(wp::decompose(0xAC00).size == 2 && wp::decompose(0xD7A3).size == 3 && wp::decompose(0xD7A4).size == 1);
  CHECK(wp::to_lower(0x130).size == 2 && wp::to_lower(U'z').chars[0] == U'z');
}

std::string normalize(std::string_view text, const wp::NormalizerOptions& options) {
  return wp::fold(wp::clean(wp::decode(text, 0), options), options).to_utf8();
}

void test_normalizer() {
  const wp::NormalizerOptions uncased, cased{true, true, false, false}, bare{false, false, false, false};
  const wp::NormalizerOptions keep_accents{true, true, false, true};
  CHECK(normalize("H\xC3\xA9LLO\t\xE4\xB8\xAD!", uncased) == "hello  \xE4\xB8\xAD !");
  CHECK(normalize("H\xC3\xA9LLO\t", cased) == "H\xC3\xA9LLO ");
  CHECK(normalize("H\xC3\xA9LLO\t", keep_accents) == "h\xC3\xA9llo ");
  CHECK(normalize(std::string("a\0b\x01", 4), uncased) == "ab");
  CHECK(normalize(std::string("a\0b\x01\t", 5), bare) == std::string("a\0b\x01\t", 5));
  CHECK(normalize("\xC4\xB0", uncased) == "i");  // U+0130: the dot is an accent
  CHECK(normalize("\xC4\xB0", keep_accents) == "i\xCC\x87");
  CHECK(normalize("\xCE\xA3\xCE\xA3", uncased) == "\xCF\x83\xCF\x83");  // no final sigma
  CHECK(normalize("", uncased).empty());
}

void test_reordered_sources() {
  // U+1D15E decomposes to a note head and a stem of class 216, which accent stripping keeps. A mark of class 1 behind
  // it (U+0334, stripped) is sorted before the stem and takes its place in the count of sources.
  wp::NormalizerOptions options;
  const wp::NormalizedText text = wp::fold(wp::decode("\xF0\x9D\x85\x9E\xCC\xB4x", 7), options);
  CHECK(text.chars == std::vector<char32_t>({0x1D157, 0x1D165, U'x'}));
  CHECK(text.sources == std::vector<std::uint32_t>({7, 8, 9}));
}

std::string show_pieces(const wp::AddedTokenFinder& finder, std::string_view text) {
  std::string shown;
  finder.split(text, [&](const wp::AddedTokenFinder::Piece& piece) {
    shown += '<' + std::string(text.substr(piece.start, piece.stop - piece.start));
    if (piece.id >= 0) shown += ':' + std::to_string(piece.id);
    shown += '>';
  });
  return shown;
}

void test_added_tokens() {
  const wp::AddedTokenFinder finder({{"[A]", 1, false, false, false, false},
                                     {"[A]B", 2, false, false, false, false},
                                     {"[L]", 3, false, true, false, false},
                                     {"[R]", 4, false, false, true, false},
                                     {"word", 5, true, false, false, false},
                                     {"[A]", 6, false, false, false, false},  // a repeat: the first counts
                                     {"", 7, false, false, false, false}});   // empty: ignored
  CHECK(show_pieces(finder, "") == "");
  CHECK(show_pieces(finder, "x[A]y") == "<x><[A]:1><y>");
  CHECK(show_pieces(finder, "[A]B[A]") == "<[A]B:2><[A]:1>");
  CHECK(show_pieces(finder, "[A") == "<[A>");
  CHECK(show_pieces(finder, "x  [L] y") == "<x><  [L]:3>< y>");
  CHECK(show_pieces(finder, "x [R]  y") == "<x ><[R]  :4><y>");
  CHECK(show_pieces(finder, "[R]  [L]") == "<[R]  :4><[L]:3>");
  CHECK(show_pieces(finder, "[R]\xE3\x80\x80y") == "<[R]\xE3\x80\x80:4><y>");  // U+3000 is whitespace
  CHECK(show_pieces(finder, "word sword words wor-word") == "<word:5>< sword words wor-><word:5>");
  CHECK(show_pieces(finder, "word\xC3\xA9 \xC3\xA9word") == "<word\xC3\xA9 \xC3\xA9word>");
  CHECK(wp::AddedTokenFinder({}).empty());
  CHECK(show_pieces(wp::AddedTokenFinder({}), "x") == "<x>");
}

// The table against the stages it was made from, for every code point and several options.
void test_char_table() {
  std::vector<wp::CharToken> every_char;  // a token each, whose id is the code point
  for (char32_t c = 0; c < 0x110000; ++c) every_char.push_back({c, static_cast<std::int32_t>(c)});
  for (const wp::NormalizerOptions& options :
       {wp::NormalizerOptions{}, wp::NormalizerOptions{true, true, false, false},
        wp::NormalizerOptions{false, false, true, false}, wp::NormalizerOptions{true, false, false, true}}) {
    const wp::CharTable table(options, every_char, 7), bare(options, {}, 7);
    for (char32_t c = 0; c < 0x110000; ++c) {
      if (c == 0x32000) c = 0xE0000;  // nothing but unassigned code points in between
      if (c == 0xE2000) c = 0x10F000;
      wp::NormalizedText one;
      one.append(c, 0);
      std::vector<char32_t> want = wp::fold(wp::clean(one, options), options).chars;
      if (options.handle_chinese_chars && wp::is_cjk(c)) want = {want.begin() + 1, want.end() - 1};
      const wp::CharEntry entry = table[c];
      std::vector<char32_t> got;
      switch (entry.action()) {
        case wp::CharAction::kCopy:
          got = {c};
          break;
        case wp::CharAction::kSubstitute:
          got = {entry.value()};
          break;
        case wp::CharAction::kIsolate:
          got = {entry.value()};
          CHECK(bare[c] == entry.with_value(7));
          break;
        case wp::CharAction::kRemove:
          break;
        case wp::CharAction::kSpace:
          CHECK(want.size() == 1 && wp::is_whitespace(want[0]));
          continue;
        case wp::CharAction::kExpand: {
          const wp::Mapping mapping = wp::expand_char(c, options);
          got.assign(mapping.chars, mapping.chars + mapping.size);
        }
      }
      CHECK(got == want);
      if (wordpiece_test::failures() > 20) return;
    }
  }
}

}  // namespace

int main() {
  test_utf8_round_trip();
  test_utf8_repair();
  test_fixed_width_forms();
  test_properties();
  test_normalizer();
  test_reordered_sources();
  test_added_tokens();
  test_char_table();
  return wordpiece_test::report("wordpiece_text");
}
